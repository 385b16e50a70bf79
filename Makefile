# Every target is complete on its own on a fresh machine: it makes the virtual environment first if that is missing or old.
PYTHON ?= python3
BIN := .venv/bin

# Two processes with a thread each are quicker than one with two: most tests are Python's own work.
# Bytecode is kept, whatever the environment says: each draft process would compile the package anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal
MEASURED := core exec models text

.PHONY: setup demo test test-all coverage lint docs benchmarks clean

setup: .venv/.complete

PLUGIN := plugins/llm-specbranch

.venv/.complete: pyproject.toml constraints.txt $(PLUGIN)/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ". Try: make setup PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,dev]' --editable $(PLUGIN)
	touch $@

demo: setup
	$(BIN)/specbranch models pull
	$(BIN)/python scripts/demo.py

# The quick tests: every package, every promise, every method on every executor. CONTRIBUTING.md says what they leave out.
test: setup
	$(BIN)/specbranch models pull
	$(PYTEST) -m "not slow"

test-all: setup
	$(BIN)/specbranch models pull
	$(PYTEST)

# How much of the engine the quick tests run.
coverage: setup
	$(BIN)/specbranch models pull
	$(PYTEST) -m "not slow" $(MEASURED:%=--cov=specbranch.%) --cov-report=term:skip-covered

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p specbranch
	$(BIN)/mypy $(PLUGIN)/llm_specbranch

# The documentation site, in build/site; a link that leads nowhere is an error.
docs: setup
	$(BIN)/python scripts/build_docs.py

# The modelled tables of docs/benchmarks.md; SPECBRANCH_DATA names the folder of the public prompts.
benchmarks: setup
	$(BIN)/specbranch bench run --preset modelled --out bench-modelled
	$(BIN)/python scripts/write_benchmarks.py --modelled bench-modelled

clean:
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
