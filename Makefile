# `make quantize` and `make test` do all their own set-up in .venv; a second run skips it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FLOOR := 73
SOURCES := quantc passes patterns backends tests benchmarks examples

.PHONY: quantize test test-all check format docs wheel bench clean

# Kept bytecode spares every run of the tests the rewriting of their asserts, whatever the environment says.
test test-all: export PYTHONDONTWRITEBYTECODE :=

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[dev]"
	touch $@

quantize: $(READY)  ## the main job on the embedded example; reports/digits.html is a report to open
	$(BIN)/quantc quantize --out reports/digits.qc

test: $(READY)  ## what must never break; ARGS=--hypothesis-profile=random draws other examples each time
	$(BIN)/python -m pytest -q -n 2 -m "not slow" $(ARGS)

test-all: $(READY)  ## everything, the slow tests too, on examples drawn anew; fails below the floor of coverage
	$(BIN)/python -m pytest -q -n 2 --hypothesis-profile=random --cov --cov-report=term --cov-fail-under=$(FLOOR) $(ARGS)

check: $(READY)  ## lint, format, spelling, layers and types, over every source file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $(SOURCES) docs *.md
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m tests.support.check_types

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## regenerate the pages that are made from the code
	$(BIN)/quantc passes --markdown > docs/passes.md
	$(BIN)/quantc backends --markdown > docs/backends.md
	$(BIN)/quantc ops --markdown > docs/integer-form.md
	$(BIN)/python -m quantc.cli.public_modules > docs/public-modules.md

wheel: $(READY)  ## build the wheel in a temporary folder; check what is inside, and that it imports
	$(BIN)/python -m tests.support.check_wheel

bench: $(READY)  ## growth with the size of a model; then speed beside other tools, which takes many minutes
	$(BIN)/python -m benchmarks.scale
	$(BIN)/quantc bench --floor

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
