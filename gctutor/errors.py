"""The one error a user is meant to read: a single plain sentence, shown by the command without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Input that cannot work; the message is one sentence that says what to do instead."""


def unknown(what: str, given: str, valid: Iterable[str]) -> UserError:
    """A `UserError` for an unknown name, with the nearest valid ones."""
    names = list(valid)
    lower = {name.lower(): name for name in names}
    near = [lower[match] for match in difflib.get_close_matches(given.lower(), lower, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(repr(name) for name in near)}?" if near else f"choose from {', '.join(names)}."
    return UserError(f"Unknown {what} {given!r}: {hint}")
