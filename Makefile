# Every target but gpu sets up .venv first, once: again only when a file that says what to install has changed.
# The libraries that train models of any kind are large; only what needs them installs them.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
CLIENTS := $(VENV)/.ready-clients

.PHONY: help demo test late quick coverage lint format types bench gpu notebooks docs clean

help:
	@echo "make demo      train a language model with and without a pipeline, and show four devices side by side"
	@echo "make test      run the tests (make test ARGS='-k copy' runs some)"
	@echo "make late      build the accelerator of tests/late, which make test does as well, where a C++ compiler is there"
	@echo "make quick     run the quick ones, in less than a minute: on one device, without processes and compilers"
	@echo "make coverage  run the tests, and list the lines that they leave out, at most 5%"
	@echo "make lint      check the style; make format mends it"
	@echo "make types     check the types"
	@echo "make bench     measure the time that the pipeline itself takes"
	@echo "make gpu       run all that needs a GPU, with the interpreter that is there (DRY=1: tiny, on the CPU)"
	@echo "make notebooks  run the notebooks of the documentation, and write their outputs"
	@echo "make docs      build the documentation into docs/_build/html"
	@echo "make clean     remove .venv and everything else that was made here"

$(READY): pyproject.toml setup.py constraints.txt
	@echo "Setting up $(VENV), which takes some minutes the first time ..."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	touch $@

$(CLIENTS): $(READY)
	@echo "Installing transformers, diffusers and others, which takes some minutes the first time ..."
	$(RUN) -m pip install -qq --constraint constraints.txt --editable '.[dev,clients]'
	touch $@

demo: $(READY)
	$(RUN) examples/language_model.py $(ARGS)

# By the alphabet: the files of few, long tests come first, which xdist would take last, and let a core wait for them.
PARALLEL = --numprocesses auto --dist loadfile --no-loadscope-reorder

# A compiler builds what the second run needs, on one core, while the first one imports and collects.
test: $(CLIENTS)
	$(RUN) -m tests.late > /dev/null 2>&1 & $(RUN) -m pytest $(PARALLEL) $(ARGS)
	$(RUN) -m pytest --late $(PARALLEL) $(ARGS)

late: $(READY)
	$(RUN) -m tests.late

quick: $(CLIENTS)
	$(RUN) -m pytest --quick --hypothesis-profile quick $(PARALLEL) $(ARGS)

coverage: $(CLIENTS)
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest $(PARALLEL) $(ARGS)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

lint: $(CLIENTS)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

format: $(READY)
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

types: $(CLIENTS)
	$(RUN) -m mypy torchgpipe $(wildcard torchgpipe_balancing) examples benchmarks/models tests/typed.py

bench: $(READY)
	$(RUN) -m benchmarks.host_time $(ARGS)

# On a machine that is lent for an hour there is no time for .venv, and perhaps no network.
gpu:
	$(PYTHON) -m benchmarks.gpu $(if $(DRY),--dry-run) $(ARGS)

notebooks: $(CLIENTS)
	$(RUN) -m tests.test_notebooks

docs: $(READY)
	$(RUN) -m sphinx -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
