PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2
ARGS ?=

# The workers of a parallel run share the cores.
PARALLEL := -n $(WORKERS) --dist worksteal --timeout 300

.PHONY: demo test test-full test-gpu lint format bench docs venv clean

demo: $(STAMP)            ## see what the library does, on any machine
	$(BIN)/lowp demo $(ARGS)

test: $(STAMP)            ## the CPU suite
	OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) $(ARGS)

test-full: $(STAMP)       ## every combination of options, on the CPU
	OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) -m "not gpu and not gpu2" $(ARGS)

test-gpu:                 ## the GPU suite; needs only torch and pytest, installs nothing
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests $(ARGS)

bench:                    ## timings on this machine's GPU; installs nothing
	PYTHONPATH=src $(PYTHON) -m lowp.cli.main bench $(ARGS)

lint: $(STAMP)            ## style, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP)          ## apply what lint asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)            ## the documentation site, in site/
	$(BIN)/pip install --quiet -e ".[docs]" -c constraints.txt
	$(BIN)/mkdocs build --strict

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e ".[dev]" -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
