# make serve, make test and make lint work on a fresh checkout: they find a Python, build .venv and install into it.
#
#   PYTHON=/path/to/python3     the interpreter of a new .venv (default: what scripts/find_python.sh finds)
#   EXTRAS=test,dev,cuda        optional dependencies to install ("cuda": JAX for NVIDIA GPUs)
#   NORTH_JAX_CUDA=AUTO|ON|OFF  whether CUDA kernels are compiled (AUTO: where nvcc is found)
#   ARGS="--port 8001"          arguments of make serve, make test and make test-full

EXTRAS ?= test,dev
NORTH_JAX_CUDA ?= AUTO
export NORTH_JAX_CUDA
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := .venv/bin
# Done once, and again when what is compiled or declared changes, or one of the variables above.
INSTALLED := .venv/installed-$(EXTRAS)-$(NORTH_JAX_CUDA)
CPP := $(shell find csrc ffi -name '*.h' -o -name '*.cuh' -o -name '*.cc' -o -name '*.cu')
INSTALL_INPUTS := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(CPP)

.PHONY: serve test test-full lint format clean

serve: $(INSTALLED)
	@$(BIN)/python -m serve $(ARGS)

# Two processes: compiling for XLA leaves the second core of a small machine idle otherwise. Files stay whole, for what
# their tests share.
test: $(INSTALLED)
	@$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile $(ARGS)

# Everything, long campaigns too. Each run leaves its results, with what the tests print, in tests/results.
test-full: $(INSTALLED)
	@$(BIN)/python -m pytest $(ARGS) -o junit_logging=all \
	    --junitxml=tests/results/$$(date -u +%Y-%m-%d-%H%M%S)-$$(git rev-parse --short HEAD 2>/dev/null).xml

lint: $(INSTALLED)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(INSTALLED)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The build's own tools go in first and pip builds with them instead of downloading JAX a second time for its isolation.
$(INSTALLED): $(INSTALL_INPUTS)
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) || exit 1; \
	    echo "making .venv with $$python"; \
	    "$$python" -m venv --clear .venv; \
	fi
	@echo "installing north_jax and what it needs into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet cmake jax nanobind ninja scikit-build-core
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[$(EXTRAS)]"
	@$(BIN)/python -m ffi
	@rm -f .venv/installed-* && touch "$@"
