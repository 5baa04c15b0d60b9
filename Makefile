# make demo: the main job on real data.  make test: what CI runs.  make test-gpu: on a CUDA GPU; its dry form without.
# make test-lowest: the lower bounds of pyproject.toml.  make release-check: both archives, installed and run.
# All set up their environments themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# Compile imported modules once and keep the bytecode: faster than compiling all packages, or in every process.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo docs test test-long test-lowest test-gpu test-stacks test-torchrec release-check lint format rules types layers compiled-kernels compiled-shim compiled-tests checked install clean

install: $(VENV)/.dev

# pip installs groups of pyproject.toml from 25.1 on: the one that Python brings may be older. "tiercache" was our name
# before, and is that of another project, whose files would be among ours.
$(VENV)/.tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1" "setuptools>=77" wheel
	$(BIN)/python -m pip uninstall -qq --yes tiercache
	touch $@

$(VENV)/.demo: $(VENV)/.tools pyproject.toml setup.py
	@echo "installing tiercache and the demo's packages into $(VENV) ..."
	$(PIP) --no-build-isolation --editable . --group examples
	touch $@

$(VENV)/.dev: $(VENV)/.tools pyproject.toml setup.py
	@echo "installing tiercache and the tools of its tests into $(VENV) ..."
	$(PIP) --no-build-isolation --editable . --group dev
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

# Three processes for two cores, because tests wait for disks, other processes and ranks.
test: checked
	$(BIN)/python -m pytest -n 3 -m "not long" --durations=25

test-long: checked
	$(BIN)/python -m pytest -n 2 --durations=25

# The oldest release of every requirement. Tests of optional packages are left out, or skip themselves.
LOWEST := .venv-lowest
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -c "from tiercache.kernels.cpu.compile import prepare; prepare(narrow=True)"
	$(LOWEST)/bin/python -m pytest -n 2 -m "not long" tests/cli tests/data tests/io tests/planning tests/store tests/train

$(LOWEST)/.installed: pyproject.toml setup.py tests/lowest.py
	rm -rf $(LOWEST) && $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade "pip>=25.1" "packaging>=24"
	$(LOWEST)/bin/python -m tests.lowest > $(LOWEST)/lowest.txt
	@echo "installing the lowest versions into $(LOWEST) ..."
	$(LOWEST)/bin/python -m pip install --quiet --no-compile --constraint $(LOWEST)/lowest.txt --editable . --group test-package
	touch $@

# Builds both archives, and installs and runs each in an environment of its own, outside the checkout.
release-check: $(VENV)/.dev
	$(PIP) --group release
	$(BIN)/python -m tests.release $(RELEASE)

test-stacks: $(VENV)/.dev
	@echo "installing Lightning, Accelerate and Transformers into $(VENV) ..."
	$(PIP) --group stacks
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
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info demo tiercache/kernels/cpu/__pycache__
