# make demo: the main job on real data.  make test: what CI runs.  make test-gpu: on a CUDA GPU; its dry form without.
# All set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test test-long test-gpu lint install clean

install: $(VENV)/.dev

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "setuptools>=65" wheel
	touch $@

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing tiercache and the demo's packages into $(VENV) ..."
	$(PIP) --no-build-isolation --editable ".[plots,examples]"
	touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing tiercache and the tools of its tests into $(VENV) ..."
	$(PIP) --no-build-isolation --editable ".[plots,examples,dev]"
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/python -m examples.flights

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 -m "not long" --durations=15

test-long: lint
	$(BIN)/python -m pytest --durations=15

test-gpu: $(VENV)/.dev
	$(BIN)/python -m tests.gpu

clean:
	rm -rf $(VENV) build dist *.egg-info demo
