# make demo: the main job on real data.  make test: what CI runs.  make test-gpu: on a CUDA GPU; its dry form without.
# All set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# Compile imported modules once and keep the bytecode: faster than compiling all packages, or in every process.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs test test-long test-gpu test-stacks test-torchrec lint format rules types layers compiled-kernels compiled-shim compiled-tests checked install clean

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

# The site, in site/: built offline; warnings are errors.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: format rules types layers

format: $(VENV)/.dev
	$(BIN)/ruff format --check .

rules: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

# Compiled once, or test processes would compile the same kernels concurrently.
compiled-kernels: $(VENV)/.dev
	$(BIN)/python -c "from tiercache.kernels.cpu.compile import prepare; prepare(narrow=True)"

compiled-shim: $(VENV)/.dev
	$(BIN)/python -m tests.kernels.shim

compiled-tests: $(VENV)/.dev
	$(BIN)/python -m pytest --collect-only -qq > /dev/null || true # the tests report the errors

checked: $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs=2 compiled-kernels lint docs compiled-shim compiled-tests

test: checked
	$(BIN)/python -m pytest -n 2 -m "not long" --durations=25

test-long: checked
	$(BIN)/python -m pytest --durations=25

test-stacks: $(VENV)/.dev
	@echo "installing Lightning, Accelerate and Transformers into $(VENV) ..."
	$(PIP) --no-build-isolation --editable ".[stacks]"
	$(BIN)/python -m pytest tests/stacks

# Without dependencies: torchrec requires fbgemm-gpu even if fbgemm-gpu-cpu is installed.
test-torchrec: $(VENV)/.dev
	@echo "installing torchrec into $(VENV) ..."
	$(PIP) --no-deps torchrec fbgemm-gpu-cpu tensordict pyvers cloudpickle torchmetrics lightning-utilities tqdm \
		pyre-extensions typing-inspect mypy_extensions iopath portalocker
	$(BIN)/python -m pytest tests/stacks/test_torchrec.py

test-gpu: $(VENV)/.dev
	$(BIN)/python -m tests.gpu

clean:
	rm -rf $(VENV) build dist *.egg-info demo tiercache/kernels/cpu/__pycache__
