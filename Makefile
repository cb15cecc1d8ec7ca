# Headway. `make` lists the targets. Everything goes into .venv and .headway; no system package
# is installed unasked.

PYTHON ?= python3
ENGINE ?=
BROKER ?=
VLLM ?=
VENV_PYTHON := .venv/bin/python

.PHONY: help setup demo test check fix bench broker lock clean

help:
	@echo "make demo    run the mesh on a mixed workload and report (ENGINE=vllm|simulated, BROKER=embedded|amqp://...)"
	@echo "make test    run every test this machine can run (HEADWAY_REQUIRE=rabbitmq,vllm: skips become failures)"
	@echo "make check   lint, types, architecture and the fast tests"
	@echo "make fix     format and fix what can be fixed"
	@echo "make bench   run the benchmarks, quick form"
	@echo "make broker  install RabbitMQ with apt (run as root: sudo make broker)"
	@echo "make setup   only set up .venv (VLLM=no: without torch and vLLM, from then on; VLLM=yes: with them)"

setup:
	@$(PYTHON) ops/setup.py $(if $(filter no,$(VLLM)),--no-vllm) $(if $(filter yes,$(VLLM)),--vllm)

demo: setup
	@$(VENV_PYTHON) -m ops.demo $(if $(ENGINE),--engine $(ENGINE)) $(if $(BROKER),--broker $(BROKER)) $(DEMO_ARGS)

test: setup
	@$(VENV_PYTHON) -m ops.test $(TEST_ARGS)

check: setup
	@$(VENV_PYTHON) -m ops.check

fix: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

bench: setup
	@$(VENV_PYTHON) -m ops.bench --quick $(BENCH_ARGS)

broker:
	apt-get update && apt-get install -y rabbitmq-server

lock: setup
	@.venv/bin/pip freeze --exclude-editable | grep -iv '^torch\|^vllm\|@ file\|^headway' | sort -f > .headway-lock
	@{ head -1 ops/requirements/lock.txt; cat .headway-lock; } > ops/requirements/lock.new
	@mv ops/requirements/lock.new ops/requirements/lock.txt; rm .headway-lock

clean:
	rm -rf .headway results
