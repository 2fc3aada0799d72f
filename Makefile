# Everything a new user or CI calls. `make help` lists it.
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
WITH := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
TABLE ?= zeta_dp_2021/1
CONSTRAINTS ?= constraints.txt
SEEDS ?=
PROFILE ?=
MUTANTS ?= 300

$(STAMP): $(CONSTRAINTS) pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 to 3.14 found; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

.PHONY: help install run test lint types mutants pins vulnerabilities format table reproduce gpu report docs wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## build .venv from CONSTRAINTS=constraints.txt, or constraints-newest.txt (once)

run: $(STAMP) ## the main job: a complex network trained privately in under a minute
	$(BIN)/zdp-bench run recipe=quickstart

test: $(STAMP) lint types ## ruff, the type checker and the whole test suite
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(STAMP) ## ruff: lint and format check
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP) ## mypy
	$(BIN)/mypy

mutants: $(STAMP) ## change the private code at random, for MUTANTS=300 seconds, and see that tests fail; SEED=... draws the same again
	$(BIN)/python .ci/mutants.py --seconds $(MUTANTS) $(if $(SEED),--seed $(SEED))

pins: $(STAMP) ## write the hashes of what the image installs, from constraints.txt
	$(BIN)/python .ci/pins.py

vulnerabilities: $(STAMP) ## hold the pinned dependencies against the OSV database; says so where that cannot be reached
	.ci/vulnerabilities $(BIN)/pip-audit

format: $(STAMP) ## let ruff format the code and fix what it can
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

table: $(STAMP) ## write a table from the records: make table TABLE=zeta_dp_2021/1; TABLE= writes all
	$(BIN)/zdp-bench table $(TABLE) --write

reproduce: $(STAMP) ## run what is lacking, then write it: PROFILE=smoke|here|paper for all tables, or TABLE=zeta_dp_2021/1 SEEDS=3
	$(BIN)/zdp-bench reproduce $(if $(PROFILE),--profile $(PROFILE),$(TABLE)) $(if $(SEEDS),--seeds $(SEEDS))

gpu: ## on a machine with a GPU: its tests, the bench tables, then the rows as published; with .venv or, without one, with PYTHON and its own torch
	@$(WITH) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "make gpu: the PyTorch of $(WITH) finds no GPU on this machine" >&2; exit 2; }
	$(WITH) -m pytest -q -m gpu tests/gradients tests/privacy tests/training
	$(WITH) -m zdp_bench bench
	$(WITH) -m zdp_bench reproduce --profile here --only as-published device=cuda

docs: $(STAMP) ## build docs/_build/html; warnings are errors
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

report: $(STAMP) ## results/report.html: every table, ε, curve and figure on one page
	$(BIN)/zdp-bench report

wheel: $(STAMP) ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .

clean: ## remove .venv and caches (results stay)
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache
