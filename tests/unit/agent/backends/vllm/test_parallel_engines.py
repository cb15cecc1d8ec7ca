"""Engines on several devices: names, telemetry of ranks, processes."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from services.agent.backends.base import EngineLoad
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import identity_of
from services.agent.backends.vllm.front.parallel import device_name, num_devices
from services.agent.backends.vllm.front.rank_stats import RankStats
from services.agent.backends.vllm.shared.stats import StatsWriter, rank_path
from services.agent.backends.vllm.shared.wire import HostReady
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import Capability, EngineIteration

TREES = "services.agent.backends.vllm.host.processes.process_trees"


def entry(**engine_args: int) -> ModelEntry:
    return ModelEntry(
        name=ModelName("m"),
        path="/models/m",
        architecture="LlamaForCausalLM",
        max_model_len=64,
        engine_args=engine_args,
    )


@pytest.mark.parametrize(
    ("engine_args", "expected"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": 1}, 4),
    ],
)
def test_sizes_of_an_engine_determine_its_number_of_devices(
    engine_args: dict[str, int], expected: int
) -> None:
    assert num_devices(entry(**engine_args)) == expected


def test_the_name_of_the_device_contains_the_sizes_of_the_engines() -> None:
    one, two = entry(), entry(tensor_parallel_size=2)

    assert device_name("H200", [one, one]) == "H200"
    assert device_name("H200", [two]) == "2 x H200"
    assert device_name("H200", [two, one]) == "1/2 x H200"
    assert device_name("H200", []) == "H200"


def test_engines_on_several_devices_have_no_checkpoints_and_no_safepoints() -> None:
    host = HostReady("0.32.0", "cpu", is_cpu=True)
    two = entry(tensor_parallel_size=2)
    optional = {Capability.CHECKPOINT, Capability.LAYER_PREEMPTION}

    assert not optional & identity_of(VllmSettings(), host, (two,)).capabilities
    assert optional <= identity_of(VllmSettings(), host, (two, entry())).capabilities


def test_telemetry_is_the_sum_of_the_ranks(tmp_path: Path) -> None:
    stats = RankStats(tmp_path / "1.stats", 2)
    for rank in range(2):
        writer = StatsWriter(rank_path(stats.path, rank))
        writer.write(
            EngineIteration(
                compute_tokens=rank,
                context_tokens=0,
                num_decodes=0,
                duration_s=0.1,
                prefill_pairs=0.0,
            )
        )
        writer.publish(
            EngineLoad(
                running=1 + rank,
                max_running=64,
                kv_utilization=0.5 * rank,
                kv_capacity_tokens=1000,
                token_budget=2048,
            )
        )
    load = stats.load()

    assert (load.running, load.max_running, load.kv_capacity_tokens) == (3, 128, 2000)
    assert load.kv_utilization == 0.25
    assert load.token_budget == 2048
    assert [each.compute_tokens for each in stats.drain()] == [0, 1]
    assert stats.drain() == ()


def test_limits_are_divided_among_the_ranks(tmp_path: Path) -> None:
    stats = RankStats(tmp_path / "1.stats", 2)
    stats.limit(token_budget=512, max_running=5)

    limits = [StatsWriter(path).limits() for path in stats.paths]
    assert limits == [(512, 3), (512, 3)]


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module under test, without importing vLLM."""
    name = "services.agent.backends.vllm.host.core_engine"
    module = ModuleType(name)
    vars(module)["CoreEngine"] = object
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, TREES, raising=False)
    found = import_module(TREES)
    monkeypatch.delitem(sys.modules, TREES)
    return found


@pytest.fixture
def engine() -> Iterator[Any]:
    """An engine whose core is this process, with one worker."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as worker:
        core = SimpleNamespace(pid=psutil.Process().pid, join=lambda timeout: None)
        yield SimpleNamespace(
            processes=(core,), workers=(psutil.Process(worker.pid),), shutdown=lambda: None
        )
        worker.kill()


def test_workers_count_as_memory_of_their_engine(trees: Any, engine: Any) -> None:
    both = trees.engine_bytes(engine)
    engine.workers = ()

    assert 0 < trees.engine_bytes(engine) < both


def test_the_children_of_the_cores_are_found(trees: Any, engine: Any) -> None:
    assert set(engine.workers) <= set(trees.children_of(engine))


def test_an_engine_ends_with_its_workers(trees: Any, engine: Any) -> None:
    trees.end_engine(engine)

    assert not any(worker.is_running() for worker in engine.workers)


def test_an_end_that_never_returns_does_not_stop_the_host(
    trees: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(trees, "_CLEANUP_TIMEOUT_S", 0.01)
    engine.shutdown = may_end.wait
    trees.end_engine(engine)
    assert all(worker.is_running() for worker in engine.workers)

    may_end.set()
