# Two commands matter: `make test` (lint, types, tests) and `make demo` (the main job on the embedded data).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test demo docs campaign lint types pytest clean

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

pytest: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

demo: $(STAMP)
	$(BIN)/python tools/demo.py

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

campaign: $(STAMP)  # attacks; WORDS="--seed 1 --minutes 60 --only kills,folders"
	$(BIN)/python -m tests.campaign $(WORDS)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[all]'
	touch $@

clean:
	rm -rf $(VENV) runs dist .pytest_cache .mypy_cache .ruff_cache
