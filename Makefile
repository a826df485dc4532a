# Everything runs in .venv; nothing outside this folder is changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint setup bench traces clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/lazytrain demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

traces: setup  ## trace every model of the catalogue again and rewrite its shipped ModelSpec
	$(BIN)/python -m lazytrain.models.regenerate

bench: setup  ## the figures of docs/benchmarks.md
	$(BIN)/python benchmarks/plans.py
	$(BIN)/python benchmarks/paper.py
	$(BIN)/python benchmarks/responsiveness.py

clean:
	rm -rf $(VENV) build dist *.egg-info
