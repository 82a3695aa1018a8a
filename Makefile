# Two commands do everything on a machine with Python 3.11 or newer: `make notebooks` and `make test`.

NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
# The first Python that is new enough; name another with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p $(NEW_ENOUGH) >/dev/null 2>&1 && echo $$p && break; done)
# What pip installs first; for another build of torch, `make TORCH="torch==2.13.0 --index-url ..."`.
TORCH ?= torch==2.13.0
EXTRAS := notebooks,liger,peft,slides,dev
# The notebooks to run, all of them by default: `make notebooks ONLY="02 03"`.
ONLY ?=

BIN := .venv/bin
READY := .venv/ready
STOP = { echo "make: $$why" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help notebooks test lab lint check refresh slides site bench clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.* ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

notebooks: $(READY) ## Run the series on the hardware here; notebooks, pages and figures go to build/
	@$(BIN)/gctutor notebooks run $(ONLY)

test: $(READY) ## Run every test
	@why="a test failed: read the lines above, or run it alone with '$(BIN)/pytest FILE::TEST'."; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal || $(STOP)

lab: $(READY) ## Open the series in JupyterLab
	@$(BIN)/jupyter lab notebooks

lint: $(READY) ## Lint, format and types
	@why="ruff found something: '$(BIN)/ruff check --fix' mends most of it."; $(BIN)/ruff check || $(STOP)
	@why="some files are not formatted: run '$(BIN)/ruff format'."; $(BIN)/ruff format --check || $(STOP)
	@why="mypy found types that do not fit: read the lines above."; $(BIN)/mypy || $(STOP)

check: lint ## What 'lint' does, and the quick tests: about two minutes
	@why="a quick test failed: read the lines above."; OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow" || $(STOP)

refresh: $(READY) ## Execute the stale notebooks again, clean them and stamp them
	@$(BIN)/gctutor notebooks refresh $(ONLY)

slides: $(READY) ## Every figure at slide size, and a deck of them, in build/slides
	@$(BIN)/gctutor slides $(ONLY)

site: $(READY) ## The executed series as static pages in build/site
	@$(BIN)/gctutor site

bench: $(READY) ## Time the package and the mechanisms side by side: about two minutes
	@$(BIN)/python bench/speed.py

clean: ## Remove what was built and the virtual environment
	@rm -rf build .venv

$(READY): pyproject.toml constraints.txt
	@why="no Python 3.11 or newer ('$(PYTHON)' is not): install one, or name it with 'make PYTHON=...'."; \
	$(PYTHON) $(NEW_ENOUGH) || $(STOP)
	@why=".venv could not be made: install Python's venv module (Debian and Ubuntu: apt install python3-venv) and try again."; \
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv || $(STOP)
	@echo "Installing the tested versions into .venv; the first time takes minutes."
	@why="torch could not be installed: check the network and the disk (a CUDA build needs 8 GB), and try again."; \
	$(BIN)/pip install -q -c constraints.txt $(TORCH) || $(STOP)
	@why="the packages could not be installed: read pip's lines above; 'make clean' starts afresh."; \
	$(BIN)/pip install -q -c constraints.txt -e '.[$(EXTRAS)]' || $(STOP)
	@touch $@
