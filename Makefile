# `make demo` and `make test` do all of their set-up: they need Python 3.11 or newer, and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-all test-accelerator check format bench clean

demo: $(READY)
	@$(BIN)/poise demo

test: $(READY)
	@$(BIN)/pytest -m "not slow"

test-all: $(READY)
	@$(BIN)/pytest

# For machines with a GPU or another accelerator; says so and ends well on others.
test-accelerator: $(READY)
	@$(BIN)/python -m tests.accelerator_kit $(ARGS)

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# make bench NAME=overhead ARGS="--quick --json"; what is run by itself says so in its first lines.
BENCHMARKS = $(patsubst benchmarks/%.py,%,$(sort $(shell grep -l '^Run: ' benchmarks/*.py benchmarks/papers/*.py)))
bench: $(READY)
	@test -n "$(filter $(NAME),$(BENCHMARKS))" || { echo 'make bench needs NAME=..., one of: $(BENCHMARKS)' >&2; exit 2; }
	@PYTHONPATH=benchmarks$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python benchmarks/$(NAME).py $(ARGS)

clean:
	rm -rf $(VENV)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Poise needs Python 3.11 or newer; set PYTHON=... (this is " + sys.version.split()[0] + ")" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) (once; about a minute) ..." >&2
	@$(PYTHON) -m venv $(VENV) >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]' >&2
	@touch $(READY)
