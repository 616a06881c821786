# Two commands: `make quickstart` plays, learns and measures on a CPU; `make test` runs the whole suite.
# Both make .venv and install everything pinned if it is not there.
PYTHON ?= python3
VENV := .venv
OUT ?= runs/quickstart
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.installed-tests

.PHONY: quickstart test lint docs clean

quickstart: $(STAMP)
	$(BIN)/memopd quickstart --out $(OUT) $(if $(SEED),--seed $(SEED))

test: $(TESTS)
	CI=true HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(TESTS)
	$(BIN)/mkdocs build --strict

# torch comes first and alone: then nothing pulls in a CUDA build on a machine without a GPU.
$(STAMP): pyproject.toml requirements.lock
	@echo 'installing into $(VENV): two to five minutes, once'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -e .
	touch $(STAMP)

# What only tests, docs and the plug-in examples need; the pins agree with requirements.lock.
$(TESTS): $(STAMP) requirements-test.lock
	$(BIN)/pip install --quiet -r requirements-test.lock
	touch $(TESTS)

clean:
	rm -rf $(VENV) build dist *.egg-info
