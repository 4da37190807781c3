# make demo | test | test-layouts | test-64 | test-variants | test-faults | test-fuzz | test-cluster | lint | benchmark | gpu-check | venv | system-deps | clean
#
# Everything but gpu-check runs in .venv, which is made on first use and brought up to date when the requirements change.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_DATA := data/demo/stdlib
BENCHMARK := --recipe enwik8-small --num-layers 2 --seq-length 128 --runs 3
DEMO_RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)

export OMP_NUM_THREADS ?= 1

.PHONY: venv system-deps lint test test-layouts test-64 test-variants test-faults test-fuzz test-cluster demo benchmark gpu-check clean

venv: $(READY)
	@echo ".venv is ready: . .venv/bin/activate"

# torch on its own first: what comes after it then takes it as it is
$(READY): requirements.txt requirements-dev.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.11 …" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv …"
	@$(BIN)/python -m pip install -qq "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)"
	@$(BIN)/python -m pip install -qq -r requirements.txt -r requirements-dev.txt
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

system-deps:
	@.ci/system-deps

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# three at once on two cores: many tests wait for something, such as a scheduler or a rank that does not come
test: $(READY)
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

test-layouts: $(READY)
	$(BIN)/python -m pytest -q -m layouts

test-64: $(READY)
	$(BIN)/python -m pytest -q -m sixty_four -o faulthandler_timeout=1800

test-variants: $(READY)
	$(BIN)/python -m pytest -q -m variants

test-faults: $(READY) system-deps
	$(BIN)/python -m pytest -q -m faults

test-fuzz: $(READY)
	$(BIN)/python -m pytest -q -n 2 -m fuzz -o faulthandler_timeout=7200

# with an sshd, pdsh and hosts of its own, and a SLURM of several nodes; 64 ranks of it take 13 GB of memory
test-cluster: $(READY) system-deps
	$(BIN)/python -m pytest -q -m cluster -o faulthandler_timeout=3600

$(DEMO_DATA).json: | $(READY)
	@mkdir -p $(@D)
	$(BIN)/python tools/prepare_data.py stdlib --output-prefix $(DEMO_DATA)

# two tensor-parallel processes through the deepspeed launcher; on a machine with one GPU that GPU alone
demo: $(READY) $(DEMO_DATA).json
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	port=$$($(BIN)/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'); \
	if [ "$$gpus" -eq 1 ]; then size=1; else size=2; fi; \
	if [ "$$gpus" -eq 0 ]; then export DS_ACCELERATOR=cpu; fi; \
	set -x; \
	$(BIN)/deepspeed --quiet --num_gpus $$size --master_port $$port pretrain.py --recipe demo \
	    --tensor-model-parallel-size $$size --data-path $(DEMO_DATA) --save $(DEMO_RUN)

# every benchmark at a small size: a look at whether they run, not a result (docs/performance.md)
benchmark: $(READY)
	$(BIN)/python tools/benchmark.py attention $(BENCHMARK)
	$(BIN)/python tools/benchmark.py layer $(BENCHMARK) --dropout 0
	$(BIN)/python tools/benchmark.py step $(BENCHMARK) --compare eager bfloat16
	$(BIN)/python tools/benchmark.py generate $(BENCHMARK) --positions 128 1024
	$(BIN)/python tools/benchmark.py data --megabytes 16 --runs 3

# with the python, torch and numpy of the machine: no environment is made, nothing is installed
gpu-check:
	$(PYTHON) tests/gpu/check.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
