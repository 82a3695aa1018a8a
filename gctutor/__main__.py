"""`python -m gctutor`: the same as the `gctutor` command."""

import sys

from gctutor.cli import main

sys.exit(main())
