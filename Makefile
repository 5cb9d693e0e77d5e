# `make demo` shows the main job, `make test` checks it; both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two files at a time: what the tests of a file share is started once.
BY_FILE := --numprocesses=2 --dist=loadfile --no-loadscope-reorder

.PHONY: setup setup-ray demo ablation plan test test-all test-nightly test-cluster test-cluster-nightly test-postgres check docs lock clean

setup: $(STAMP)

$(STAMP): locks/cpu.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r locks/cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(STAMP)

demo: setup
	$(BIN)/python -m benchmarks.demo

# Every policy against stock vLLM on a virtual A100: the ablation of docs/performance.md, for one seed.
ablation: setup
	$(BIN)/python -m benchmarks.ablation --seeds 0

# How many engines a day of calls needs, and what a job of 6,000 rows costs beside them.
plan: setup build/reports.parquet
	$(BIN)/batchrun plan --trace jobs/day-rates.csv --job jobs/reports.yaml \
		--profile a100-8b@1.80 --max-model-len 65536 --submit-at 20h --window 30s

build/reports.parquet: | setup
	mkdir -p build
	$(BIN)/batchrun datasets sample loogle --scale full --rows 6000 -o $@

test: setup
	$(BIN)/python -m pytest $(BY_FILE) -m "not slow and not nightly and not cluster"

# The gate.
test-all: setup-ray
	$(BIN)/python -m pytest $(BY_FILE) --durations=25 -m "not nightly and (not cluster or quick)"

# Other versions of clients and of vLLM, async doubles, more seeds, long kills.
test-nightly: setup
	$(BIN)/python -m pytest --numprocesses=2 --durations=25 -m "nightly and not cluster"

# Fleets on a real Ray, on loopback: kills of all that is around a replica.
test-cluster: setup-ray
	$(BIN)/python -m pytest --durations=25 -m "cluster and not nightly"

# The same for an hour and more: forty events on three machines, and a real vLLM behind an actor.
test-cluster-nightly: setup-ray
	$(BIN)/python -m pytest --durations=25 -m "cluster and nightly"

# Ray for Python 3.11, which only fleets need.
setup-ray: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r locks/ray.txt

# The deployment tests that need no vLLM, each with its jobs in a PostgreSQL database.
test-postgres: setup
	$(BIN)/python -m pytest --store=postgresql tests/unit/test_postgresql.py tests/conformance \
		$(addprefix tests/integration/test_,$(addsuffix .py,postgres jobs_on_fake_engine \
		rows_that_fail changed_inputs kills gc_command store_commands batch_runs \
		batches_and_kills files_and_errors files_in_trouble cookbook_batch))

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir .import_linter_cache

docs: setup
	$(BIN)/mkdocs build --strict

# Resolves locks/*.in anew. Needs uv; the rest of the project does not.
lock:
	locks/update.sh

clean:
	rm -rf site dist build demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
