# One command per habit. `make serve` and `make test` do all the set-up on a fresh Debian or Ubuntu (Python >= 3.11, pip, g++).
#   make serve MODEL=smollm2 FLAGS="--port 8001"      TORCH_INDEX=URL picks another index for torch

PYTHON ?= python3
MODEL ?= smollm2
FLAGS ?=
SEEDS ?= 5000
FIRST ?= 0
TIMES ?= 20
PROCESSES ?= $(shell nproc)
BIN := .venv/bin
export PYTHONUNBUFFERED := 1

.PHONY: serve chat test quick kills chaos fmt lint types arch unit gpu gpu-check cuda-compile bench simulate nightly count docs native setup setup-dev check-python clean

serve: setup
	@exec $(BIN)/trireme serve $(MODEL) $(FLAGS)

chat: setup
	@exec $(BIN)/trireme chat $(MODEL) $(FLAGS)

test: setup-dev lint arch
	@$(BIN)/python scripts/run_tests.py $(FLAGS)

# for daily work, in three minutes: style, types, contracts, unit tests, and a server started for real
quick: setup-dev lint arch
	@$(BIN)/python scripts/run_tests.py --quick $(FLAGS)

# kill -9 of engines, workers and coordinators at random moments under mixed streams, against the undisturbed answers
kills: setup
	$(BIN)/python -m scripts.kills --model $(MODEL) $(FLAGS)

# every kind of fault at random moments of 64 mixed streams: FAULTS="kill freeze-worker", TIMES, SEED reproduce; --list names them
# and, without FAULTS, some of them done to `trireme serve` with a real model and its own back-off
chaos: setup-dev
	$(BIN)/python -m tests.chaos.run --times $(TIMES) --seed $(or $(SEED),0) $(if $(FAULTS),--fault $(FAULTS)) $(FLAGS)
	$(if $(FAULTS),,$(BIN)/python -m pytest -m slow tests/chaos/test_real.py)

fmt: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

arch: setup-dev
	$(BIN)/lint-imports

unit: setup-dev
	$(BIN)/python -m pytest tests/arch tests/unit $(FLAGS)

gpu: setup-dev
	$(BIN)/python -m pytest -m gpu tests/gpu $(FLAGS)

# builds, tests and times the CUDA side; needs a GPU, nvcc and torch for CUDA, no network
gpu-check: check-python
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu_check.py $(FLAGS)

# compiles csrc/cuda where nvcc is, GPU or not; CUDA_ARCHS="80;90" picks the architectures
cuda-compile: setup-dev
	$(BIN)/python setup.py -q cuda_compile

bench: setup
	$(BIN)/trireme bench latency $(MODEL) $(FLAGS)
	$(BIN)/trireme bench throughput $(MODEL) $(FLAGS)
	$(BIN)/trireme bench serve $(MODEL) $(FLAGS)

# coordinator, engines and clients under virtual time: SEED=n with its trace, or SEEDS=n of them from FIRST on
simulate: setup-dev
	@$(BIN)/python -m tests.sim.run $(if $(SEED),--seed $(SEED),--first $(FIRST) --count $(SEEDS) --processes $(PROCESSES))

nightly: setup-dev cuda-compile
	@$(BIN)/python -m tests.sim.run --first $(FIRST) --count 1000000 --processes $(PROCESSES)
	$(BIN)/python -m tests.sim.even_streams 10000
	$(BIN)/python -m pytest -m slow tests/chaos/test_real.py

# instructions of the hot paths against scripts/instructions.json; needs valgrind (apt-get install valgrind)
count: setup-dev
	$(BIN)/python scripts/count_instructions.py $(FLAGS)

docs: setup-dev
	$(BIN)/python scripts/make_docs.py

native: setup
	@$(BIN)/python setup.py build_ext --inplace

setup: check-python
	@$(PYTHON) scripts/bootstrap.py run

setup-dev: check-python
	@$(PYTHON) scripts/bootstrap.py dev

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is missing or older than 3.11; try   make serve PYTHON=python3.11" >&2; exit 2; }

clean:
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis models/_native*.so models/_cuda*.so serving/_native*.so
