# Everything a person or CI does here, by name. `make` lists the targets; `make test` is what CI runs.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# Many tests wait, for leases and deadlines: so there are more at a time than cores. Files come in the order of
# tests/conftest.py, the slow ones first.
PYTEST_ARGS ?= -n 5 --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
# Setup is done when this file is newer than pyproject.toml.
STAMP := $(VENV)/.setup-done
# Environments of what Penstock is compared with, one folder each; `make bench PEERS=DIR` takes others.
PEERS ?= .peers
PEER_NAMES := litdata ray readers streaming tf torchdata
BENCH_ARGS ?=
# Of `make chaos`, `make histories`, `make bucket-kills` and `make simulate`: the seed of the first run, or of the one to look at, and how many there are.
SEED ?=
RUNS ?= 5
SEEDS ?= 2000
ROUNDS ?= 500
HISTORIES_ARGS ?=
# Of `make storm`: jobs that open at once (50 if neither is given), or boxes of one job that save at once.
JOBS ?=
BOXES ?=
# Of `make soak`, for each lane.
BATCHES ?= 200000
# The fuzzer is made for few versions of Python, so it has an environment of its own.
FUZZ_VENV := .fuzz-venv
# The frameworks pin versions of datasets, transformers and fsspec that are older than those of development.
FRAMEWORKS_VENV := .frameworks
LOCK_VENV := .lock-venv
MINUTES ?= 10
FUZZ_ARGS ?=
# Of `make pythons`: the versions.
PYTHONS ?= 3.12 3.13
# Of `make frameworks`: releases that it saves with beside the installed one, most of them for Python 3.12 alone.
RELEASES := megatron-core==0.17.0 megatron-core==0.19.2 nvidia-resiliency-ext==0.4.1 nvidia-resiliency-ext==0.7.0 \
	transformers==5.23.0 transformers==5.24.0
PROTO_DIR := proto/penstock/proto/v1
PROTOS := $(wildcard $(PROTO_DIR)/*.proto)

# $(call protoc,DIR): generate code and type stubs for every .proto below DIR.
define protoc
$(BIN)/python -m grpc_tools.protoc \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--proto_path=proto \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	$(PROTOS:proto/%=%)
endef

.PHONY: help setup lock dist proto proto-check proto-baseline weight lint format format-check types docs compile pytest pytest-slow test slow simulate chaos histories bucket-kills fuzz demo
.PHONY: soak demo-streaming demo-mixture signals slurm loaders frameworks node helm bench bench-peers bench-readers gpu storm peers pythons versions clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16

setup: $(STAMP) ## make .venv with everything that development needs

# The lock is for Python 3.11 on Linux with x86-64; elsewhere pip finds what pyproject.toml admits.
LOCKED := import sys, sysconfig; sys.exit(sys.version_info[:2] != (3, 11) or sysconfig.get_platform() != 'linux-x86_64')

$(STAMP): pyproject.toml deploy/locks/development.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep -oE 'torch==[0-9.]+' pyproject.toml | head -n 1)"
	if $(BIN)/python -c "$(LOCKED)"; then \
		$(BIN)/python -m pip install --no-deps --require-hashes --requirement deploy/locks/development.txt \
		&& $(BIN)/python -m pip install --no-deps --no-build-isolation --editable .; \
	else \
		$(BIN)/python -m pip install --editable '.[dev]'; \
	fi
	touch $@

lock: ## write deploy/locks anew, with the newest versions that pyproject.toml admits
	test -x $(LOCK_VENV)/bin/uv || { $(PYTHON) -m venv $(LOCK_VENV) && $(LOCK_VENV)/bin/pip install uv==0.13.9; }
	$(LOCK_VENV)/bin/python deploy/locks/relock.py $(LOCK_VENV)/bin/uv

proto: $(STAMP) ## regenerate the protobuf code
	$(call protoc,proto)

proto-check: $(STAMP) ## the committed protobuf code is what its .proto files generate
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call protoc,"$$fresh"); \
	diff --recursive --exclude='*.proto' --exclude=__init__.py --exclude=__pycache__ \
		$(PROTO_DIR) "$$fresh/$(PROTO_DIR:proto/%=%)" \
		|| { echo 'proto-check: generated code is stale; run "make proto" and commit the result' >&2; exit 1; }

proto-baseline: $(STAMP) ## take what was added to the .proto files into the promise that tests hold them to
	PYTHONPATH=tests/support $(BIN)/python -m wire_contract

weight: $(STAMP) ## lines, lines of code and lines of docstrings by folder
	@$(BIN)/python tests/support/weight.py

lint: $(STAMP) ## ruff's rules
	$(BIN)/ruff check .

format: $(STAMP) ## rewrite the code in ruff's format
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

format-check: $(STAMP) ## the code is in ruff's format
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

docs: $(STAMP) ## the pages of docs/ as HTML in build/docs; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -n -d build/doctrees docs build/docs

compile: $(STAMP) ## bytecode of modules and tests, which a fresh clone lacks: once, and not in each process of pytest
	@$(BIN)/python -m compileall -q -x '/(test_[^/]*|conftest)\.py$$' proto appliance worker client deploy tests
	@$(BIN)/python tests/support/compile_tests.py

# Hundreds of processes are started: without bytecode on disk each one would compile our modules anew.
pytest: $(STAMP) ## the tests alone, without the slow suites; PYTEST_ARGS replaces "-n 5 --dist loadfile --no-loadscope-reorder"
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m "not slow" $(PYTEST_ARGS)

pytest-slow: $(STAMP) ## the slow suites alone: whole trainings, programs, pages, faults at many moments (SLOW_SUITES of tests/conftest.py)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m slow $(PYTEST_ARGS)

test: $(STAMP) ## the checks of the code, and the tests without the slow suites; CI runs `make slow` too
	$(MAKE) --no-print-directory -j 2 compile proto-check lint format-check
	$(MAKE) --no-print-directory -j 2 types pytest  # the tests wait now and then, and leave room for mypy

slow: $(STAMP) ## the pages of docs/, the slow suites, and `make slurm` where Slurm is installed
	$(MAKE) --no-print-directory -j 2 docs pytest-slow
	@if which slurmctld slurmd munged > /dev/null; then $(MAKE) --no-print-directory slurm; \
		else echo "make slurm is skipped: slurmctld, slurmd or munged is not installed"; fi

dist: $(STAMP) ## the sdist and the wheel in dist/, checked as the package index checks them; installs twine
	rm -rf dist
	$(BIN)/python -m pip install --quiet twine==7.0.0
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

pythons: $(STAMP) ## mypy, bytecode and tests on Python 3.12 and 3.13, which must be here; installs torch for each; PYTHONS=3.13
	for version in $(PYTHONS); do \
		$(BIN)/mypy --python-version $$version; \
		python=build/pythons/$$version/bin/python; \
		test -x $$python || python$$version -m venv build/pythons/$$version; \
		$$python -m pip install --quiet "$$(grep -oE 'torch==[0-9.]+' pyproject.toml | head -n 1)"; \
		$$python -m pip install --quiet --editable '.[dev]'; \
		$$python -W error -m compileall -q -f proto appliance worker client deploy tests examples benchmarks; \
		$$python -m pytest -q -p no:cacheprovider -m "not slow" $(PYTEST_ARGS); \
	done

versions: ## the control plane, checkpoints and a fleet with the oldest and the newest releases of the dependencies; installs 12 GB below build/versions
	$(PYTHON) tests/versions.py

simulate: $(STAMP) ## histories of a simulated cluster: SEEDS=2000 of them, or SEED=n with its diary
	PYTHONPATH=tests/simulation:tests/support $(BIN)/python -m simulated $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

chaos: $(STAMP) ## faults of every kind at random times, a minute a run; SEED=1 RUNS=5
	PYTHONPATH=tests/support:tests/inputs$${PYTHONPATH:+:$$PYTHONPATH} \
		$(BIN)/python -m chaos --seed $(or $(SEED),1) --runs $(RUNS)

histories: $(STAMP) ## random histories of training jobs against the model of tests/model; SEED=1 RUNS=5, HISTORIES_ARGS="--parallel 4"
	PYTHONPATH=tests/support:tests/inputs:tests/model$${PYTHONPATH:+:$$PYTHONPATH} PENSTOCK_CONFIG=/dev/null \
		$(BIN)/python -m proof --seed $(or $(SEED),1) --runs $(RUNS) $(HISTORIES_ARGS)

bucket-kills: $(STAMP) ## kills at any request of a job that saves into a bucket, half an hour; SEED=1 ROUNDS=500
	PYTHONPATH=tests/support:tests/inputs$${PYTHONPATH:+:$$PYTHONPATH} \
		$(BIN)/python -m bucket_kills --seed $(or $(SEED),1) --rounds $(ROUNDS)

signals: $(STAMP) ## signal handlers that save, at 200 random instants of a save
	PENSTOCK_SIGNALS=200 $(BIN)/pytest -n 0 tests/checkpoint/test_calls.py

slurm: $(STAMP) ## the templates of deploy/slurm on a Slurm of two nodes on this machine; needs Debian's slurmctld, slurmd, slurm-client, munge
	$(BIN)/pytest -n 0 tests/slurm/run_templates.py

loaders: $(STAMP) ## save and resume other libraries' loaders again and again, 30 minutes; installs datasets, webdataset, grain, litdata (150 MB)
	$(BIN)/python -m pip install datasets==5.2.0 webdataset==1.0.2 grain==0.2.18 obstore==0.12.1 tifffile==2026.3.3
	$(BIN)/python -m pip install --no-deps litdata==0.2.76  # it asks for torchvision, which would bring another torch
	$(BIN)/pytest -n 2 tests/loaders/run_third_party.py

frameworks: $(FRAMEWORKS_VENV)/.setup-done ## train inside torchtitan, Megatron-core, TRL, NeMo Automodel and JAX; their own tests from OWN_TESTS; a fleet on Ray; 8 GB
	$(FRAMEWORKS_VENV)/bin/python -m pytest -n 1 tests/frameworks/run_*.py tests/deploy/run_up_ray.py tests/integrations/test_hf_trainer.py

$(FRAMEWORKS_VENV)/.setup-done: pyproject.toml tests/frameworks/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install "$$(grep -oE 'torch==[0-9.]+' pyproject.toml | head -n 1)"
	$(@D)/bin/python -m pip install --requirement tests/frameworks/requirements.txt
	$(@D)/bin/python -m pip install --editable .
	for release in $(RELEASES); do \
		$(@D)/bin/python -m pip install --target $(@D)/releases/$$release --no-deps --only-binary=:all: \
			--python-version 3.12 --ignore-requires-python $(foreach glibc,2_28 2_31 2_39,--platform manylinux_$(glibc)_$$(uname -m)) $$release || exit 1; \
	done
	touch $@

node: ## the packages of the Node example, 14 MB from npm; its test is skipped without them
	npm ci --prefix examples/state_over_grpc --no-fund --no-audit --ignore-scripts

helm: $(STAMP) ## the Helm chart by Helm's own code, which this installs (125 MB)
	$(BIN)/python -m pip install helm-python-sdk==0.2.2
	$(BIN)/pytest -n 0 tests/deploy/test_helm.py

soak: $(STAMP) ## what each process keeps of a batch, on both lanes: 200,000 batches each, a minute or two
	$(BIN)/python -m benchmarks.soak --batches $(BATCHES)

fuzz: $(FUZZ_VENV)/.setup-done ## fuzz all that peers can send for MINUTES=10; FUZZ_ARGS="--only state" or "--replay FILE"
	$(FUZZ_VENV)/bin/python tests/fuzz/drive.py --minutes $(MINUTES) $(FUZZ_ARGS)

$(FUZZ_VENV)/.setup-done: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install "$$(grep -oE 'torch==[0-9.]+' pyproject.toml | head -n 1)"
	$(@D)/bin/python -m pip install --editable '.[fuzz]'
	touch $@

demo: $(STAMP) ## train a small model through Penstock on this machine
	PYTHONPATH=examples $(BIN)/python -m train_lm.demo

demo-streaming: $(STAMP) ## train from shards on an HTTP server, and resume on other boxes and workers
	PYTHONPATH=examples $(BIN)/python -m streaming.demo

demo-mixture: $(STAMP) ## change a mixture of three texts in mid-run by command, kill, and resume on another topology
	PYTHONPATH=examples $(BIN)/python -m mixture.demo

bench: $(STAMP) ## measure the whole path beside its peers, 10 minutes; BENCH_ARGS="--quick" for a try
	$(BIN)/python -m benchmarks.full_path --peers $(PEERS) $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.first_batch

bench-peers: $(PEER_NAMES:%=$(PEERS)/%/.setup-done) ## make the peers' environments, 5 GB below PEERS

gpu: $(STAMP) ## all checks that need a CUDA device, 10 minutes; writes benchmarks/gpu.md
	$(BIN)/python -m benchmarks.gpu

storm: $(STAMP) ## many jobs opened at the same moment on two daemons: all of them must run; JOBS=50, or BOXES=200 of one job that save at once
	$(BIN)/python -m benchmarks.storm $(if $(BOXES),--save --boxes $(BOXES),--jobs $(or $(JOBS),50))

peers: $(PEERS)/streaming/.setup-done $(STAMP) ## mosaicml-streaming alone, 2 GB below PEERS; it reads our datasets, and we its own
	STREAMING_PYTHON=$(abspath $(PEERS))/streaming/bin/python $(BIN)/pytest tests/datasets/test_live.py

# torch goes first and alone, so that pip takes the build that this machine's configuration prefers, and not another
# one that some package's dependencies would bring.
$(PEERS)/%/.setup-done: benchmarks/peers/requirements/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	if grep -q '^torch==' $<; then $(@D)/bin/python -m pip install $$(grep -E '^(torch|numpy)==' $<); fi
	$(@D)/bin/python -m pip install --requirement $<
	if test -f $(<:.txt=.no-deps.txt); then $(@D)/bin/python -m pip install --no-deps --requirement $(<:.txt=.no-deps.txt); fi
	touch $@

bench-readers: $(PEERS)/readers/.setup-done ## read other libraries' formats beside their own readers, 20 minutes; 2 GB below PEERS
	$(PEERS)/readers/bin/python -W ignore -m benchmarks.readers --peers $(PEERS) $(BENCH_ARGS)

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) $(FUZZ_VENV) $(FRAMEWORKS_VENV) .fuzz .peers benchmarks/out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
