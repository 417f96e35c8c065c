# `make demo` and `make test` require Debian or Ubuntu with python3 and g++. They install into .venv.
# PYTHON selects the interpreter, TORCH the version of PyTorch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml scripts/generate_kernels.py scripts/flags_by_file.py $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-capabilities sanitize docs lint format clean
.DELETE_ON_ERROR:

# Runs on the GPU if the CUDA kernels support it, else on the CPU.
demo: $(VENV)/built
	@device=$$($(BIN)/python -m flash_dmattn.info --device) || exit 1; \
	echo "flash_dmattn demo on: $$device"; \
	$(BIN)/python benchmarks/backward_equivalence.py --device $$device --backend $$device && \
	$(BIN)/python examples/train_lm.py --device $$device --steps 60 --plot loss.png

# The tests build the site, too.
test: lint $(VENV)/docs
	$(BIN)/python -m pytest -n auto --dist loadgroup

# The CPU kernels of each instruction set that this machine has, with 1, 2 and 16 threads.
test-capabilities: $(VENV)/built
	$(BIN)/python scripts/check_capabilities.py

sanitize: $(VENV)/built
	$(BIN)/python scripts/sanitize.py

# The site of mkdocs.yml, in site/. A broken link is an error. Needs no compiler and no PyTorch.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

lint: $(VENV)/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/built
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site *.egg-info flash_dmattn/*.so flash_dmattn/_C.torch

$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { echo "python3 is missing: apt install python3 python3-venv python3-dev"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed, got $$($(PYTHON) --version)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/docs: $(VENV)/created pyproject.toml
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@

# PyTorch comes first: the extension is built against the installed version.
$(VENV)/installed: $(VENV)/created pyproject.toml
	@command -v g++ >/dev/null || { echo "g++ is missing: apt install g++"; exit 1; }
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet 'setuptools>=77' wheel ninja pybind11 packaging
	@touch $@

$(VENV)/built: $(VENV)/installed $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation -e '.[test]'
	@$(BIN)/python -m flash_dmattn.info | grep -F 'CUDA kernels'
	@touch $@
