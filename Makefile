# `make test` (lint, types, tests), `make test-kernels` (Triton kernels interpreted and compiled, no GPU needed) and
# `make demo` (the main job on the embedded data).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: test test-kernels demo docs campaign lint types pytest clean

test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 3 lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

pytest: $(STAMP)
	$(PYTEST) -m "not kernels"

test-kernels: $(STAMP)
	$(PYTEST) -m kernels

demo: $(STAMP)
	$(BIN)/python tools/demo.py

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

campaign: $(STAMP)  # attacks; WORDS="--seed 1 --minutes 60 --only kills,folders"
	$(BIN)/python -m tests.campaign $(WORDS)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -e '.[all]'
	touch $@

clean:
	rm -rf $(VENV) runs dist .pytest_cache .mypy_cache .ruff_cache
