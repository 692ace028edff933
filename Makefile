PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2
ARGS ?=

# The workers of a parallel run share the cores.
PARALLEL := -n $(WORKERS) --dist worksteal --timeout 300

GPU_TESTS = $(shell $(PYTHON) -c "import torch; print('gpu or gpu2' if torch.cuda.device_count() > 1 else 'gpu')")

.PHONY: demo test test-full test-gpu test-gpu-full test-gpu2 lint format bench docs venv clean

demo: $(STAMP)            ## see what the library does, on any machine
	$(BIN)/lowp demo $(ARGS)

test: $(STAMP)            ## the CPU suite
	OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) $(ARGS)

test-full: $(STAMP)       ## every combination of options, on the CPU
	OMP_NUM_THREADS=1 $(PYTEST) $(PARALLEL) -m "not gpu and not gpu2" $(ARGS)

test-gpu: GPU_MARKS = ($(GPU_TESTS)) and not timed and not full
test-gpu-full: GPU_MARKS = ($(GPU_TESTS)) and not timed
# With xdist, GPU_WORKERS=16 runs test-gpu in 7 minutes on 16 cores; what is timed runs alone.
test-gpu test-gpu-full:   ## the GPU suite, with two GPUs the distributed part too; needs only torch and pytest
	PYTHONPATH=src OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m "$(GPU_MARKS)" \
		$(if $(GPU_WORKERS),-n $(GPU_WORKERS) --dist worksteal) tests $(ARGS)
	PYTHONPATH=src $(PYTHON) -m pytest -m timed tests $(ARGS)

test-gpu2:                ## the part that needs two GPUs
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu2 tests $(ARGS)

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
