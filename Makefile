# make demo, make test: on any Linux machine with Python 3.10 or newer, gcc and the
# CUDA toolkit. See `make help`.

# An absolute path: the recipes below pass it on.
PYTHON := $(shell PYTHON='$(PYTHON)' tools/find-python)
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all docs setup clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## set up, show a mark at work, replay recorded jobs, and train
	@python=$$($(SETUP)) && PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" "$$python" tools/demo.py

test: PYTEST_TIER := --quick
test: ## set up and run the tests that find most in a few minutes (PYTEST_ARGS=...)
	@$(RUN_TESTS)

test-all: ## set up and run every test that this machine can run, as CI does
	@$(RUN_TESTS)

docs: ## build the documents as a site, in build/site (needs neither torch nor a build)
	@python=$$(test -n '$(PYTHON)' && '$(PYTHON)' tools/environment.py docs) && \
	  NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs build --strict

setup: ## find or make an environment, and build the extensions in place
	@$(SETUP)

clean: ## remove all that was built, and the environment
	rm -rf build dist .venv .venv-docs *.egg-info esper_alloc/_build.py esper_alloc/include
	rm -f esper_alloc/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [ -f tests/core/Makefile ]; then $(MAKE) -s -C tests/core clean; fi

RUN_TESTS = python=$$($(SETUP)) && PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" "$$python" -m pytest -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_TIER) $(PYTEST_ARGS)
SETUP = test -n '$(PYTHON)' && '$(PYTHON)' tools/environment.py
