"""Parts that the backends share."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.agent.backends import registry
from services.agent.backends.base import (
    EngineLoad,
    EngineRequest,
)
from services.agent.backends.checks import check_request, finished_already, stop_tokens
from services.agent.backends.settings import EngineSettings, VllmSettings
from services.agent.backends.totals import CheckpointTotals
from services.agent.backends.vllm.front.arguments import engine_arguments
from services.agent.backends.vllm.front.backend import identity_of
from services.agent.backends.vllm.shared.core_settings import refusal, refusal_reason
from services.agent.backends.vllm.shared.schedulers import POLICY, STOCK, fit_scheduler
from services.agent.backends.vllm.shared.stats import StatsReader, StatsWriter
from services.agent.backends.vllm.shared.wire import HostReady
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import FinishReason, Sampling
from shared.contracts.telemetry import Capability, EngineIteration
from shared.runtime.clock import SystemClock

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
ENTRY = ModelEntry(
    name=A,
    path="/models/a",
    architecture="LlamaForCausalLM",
    max_model_len=64,
    eos_token_ids=(2,),
    engine_args={"max_num_seqs": 7},
)


def request(progress: tuple[int, ...] = (), *, ignore_eos: bool = False) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId("r"),
        model=A,
        prompt=(5, 6),
        sampling=Sampling(max_tokens=4, ignore_eos=ignore_eos),
        progress=progress,
        stop_token_ids=(9,),
    )


def test_end_tokens_and_stops_end_an_answer() -> None:
    assert stop_tokens(ENTRY, request()) == (2, 9)
    assert stop_tokens(ENTRY, request(ignore_eos=True)) == (9,)


@pytest.mark.parametrize(
    ("progress", "reason"),
    [
        ((), None),
        ((7, 8), None),
        ((7, 8, 7, 8), FinishReason.LENGTH),
        ((7, 9), FinishReason.STOP),
        ((7, 2), FinishReason.STOP),
        (tuple(range(10, 72)), FinishReason.LENGTH),
    ],
)
def test_progress_may_already_be_a_whole_answer(
    progress: tuple[int, ...], reason: FinishReason | None
) -> None:
    assert finished_already(ENTRY, request(progress)) is reason


def test_the_vocabulary_is_not_checked_when_unknown() -> None:
    check_request(ENTRY, request((10**6,)), None)
    with pytest.raises(EngineError, match="vocabulary of 512"):
        check_request(ENTRY, request((10**6,)), 512)


@pytest.mark.parametrize(
    ("lengths", "prompt", "message"),
    [
        ((), 3, "task is embed"),
        ((2, 2), 3, "do not agree"),
        ((0, 3), 3, "do not agree"),
        ((65,), 65, "an input has 65 tokens"),
        ((64, 64), 128, None),
    ],
)
def test_inputs_of_pooling_models_are_checked(
    lengths: tuple[int, ...], prompt: int, message: str | None
) -> None:
    entry = msgspec.structs.replace(ENTRY, task="embed", max_model_len=64)
    asked = replace(request(), prompt=(10,) * prompt, input_lengths=lengths)
    if message is None:
        check_request(entry, asked, 512)
        return
    with pytest.raises(EngineError, match=message):
        check_request(entry, asked, 512)


def test_models_that_generate_refuse_inputs() -> None:
    with pytest.raises(EngineError, match="task is generate"):
        check_request(ENTRY, replace(request(), prompt=(10,), input_lengths=(1,)), None)


def test_engines_of_pooling_models_have_no_copies_and_no_safepoints() -> None:
    entry = msgspec.structs.replace(ENTRY, task="embed", max_model_len=9000)
    arguments = engine_arguments(entry, VllmSettings(), is_cpu=True, stats_path=Path("/stats"))

    assert arguments["runner"] == "pooling"
    assert arguments["enable_prefix_caching"] is None
    assert arguments["max_num_batched_tokens"] == 9000
    assert arguments["additional_config"]["headway"]["safepoint_layers"] == 0
    assert "PolicyScheduler" in arguments["scheduler_cls"]
    assert "kv_transfer_config" not in arguments


def test_unknown_backend_error_lists_the_known_backends() -> None:
    with pytest.raises(SettingsError, match="simulated, vllm"):
        registry.create_backend("none", (), EngineSettings(), SystemClock())


def test_engine_args_of_a_model_override_settings() -> None:
    arguments = engine_arguments(
        ENTRY, VllmSettings(max_running=3), is_cpu=True, stats_path=Path("/stats")
    )

    assert arguments["max_num_seqs"] == 7
    assert arguments["dtype"] == "float32"
    assert arguments["kv_cache_memory_bytes"] == 128 << 20


def test_gpu_keeps_the_defaults_of_vllm() -> None:
    arguments = engine_arguments(ENTRY, VllmSettings(), is_cpu=False, stats_path=Path("/stats"))

    chosen_by_vllm = {
        "async_scheduling",
        "block_size",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
    }
    assert arguments["dtype"] == "auto"
    assert not arguments["enforce_eager"]
    assert not chosen_by_vllm & (set(arguments) - set(ENTRY.engine_args))


def test_settings_take_precedence_over_the_defaults_of_the_gpu() -> None:
    settings = VllmSettings(
        eager=True, async_scheduling=False, max_running=512, token_budget=256, block_tokens=64
    )
    entry = msgspec.structs.replace(ENTRY, engine_args={})
    arguments = engine_arguments(entry, settings, is_cpu=False, stats_path=Path("/stats"))

    assert arguments["enforce_eager"]
    assert arguments["async_scheduling"] is False
    # Each running request needs a token in each iteration.
    assert (arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (512, 512)
    assert arguments["block_size"] == 64


def test_pooling_models_on_a_gpu_keep_the_token_budget_of_vllm() -> None:
    entry = msgspec.structs.replace(ENTRY, task="embed", max_model_len=9000, engine_args={})
    arguments = engine_arguments(entry, VllmSettings(), is_cpu=False, stats_path=Path("/stats"))

    assert "max_num_batched_tokens" not in arguments


def test_requested_safepoints_on_a_gpu_turn_off_what_they_do_not_work_with() -> None:
    settings = VllmSettings(safepoint_layers=4)
    arguments = engine_arguments(ENTRY, settings, is_cpu=False, stats_path=Path("/stats"))

    assert arguments["enforce_eager"]
    assert arguments["async_scheduling"] is False


@pytest.mark.parametrize(
    ("is_async", "scheduler_cls", "expected"),
    [
        (True, POLICY, "AsyncPolicyScheduler"),
        (True, STOCK, "AsyncTimedScheduler"),
        (True, "operator.Scheduler", "Scheduler"),
        (False, POLICY, "PolicyScheduler"),
    ],
)
def test_scheduler_class_follows_the_decision_of_vllm(
    *, is_async: bool, scheduler_cls: str, expected: str
) -> None:
    scheduler = SimpleNamespace(async_scheduling=is_async, scheduler_cls=scheduler_cls)
    fit_scheduler(SimpleNamespace(scheduler_config=scheduler))

    assert scheduler.scheduler_cls.rpartition(".")[2] == expected


@pytest.mark.parametrize(
    ("host_kv_bytes", "is_cpu", "expected"),
    [
        (None, True, {"host_kv_bytes": 256 << 20, "required": False}),
        (1 << 20, True, {"host_kv_bytes": 1 << 20, "required": True}),
        (0, True, None),
        (None, False, None),
    ],
)
def test_checkpoints_are_on_by_default_where_supported(
    *, host_kv_bytes: int | None, is_cpu: bool, expected: dict[str, Any] | None
) -> None:
    settings = VllmSettings(host_kv_bytes=host_kv_bytes)
    arguments = engine_arguments(ENTRY, settings, is_cpu=is_cpu, stats_path=Path("/stats"))
    transfer = arguments.get("kv_transfer_config", {})
    host = HostReady("0.32.0+build", "device", is_cpu)

    assert transfer.get("kv_connector_extra_config") == expected
    has_them = Capability.CHECKPOINT in identity_of(settings, host, (ENTRY,)).capabilities
    assert has_them == (expected is not None)


def test_refusal_of_the_engine_core_reaches_the_host(tmp_path: Path) -> None:
    arguments = engine_arguments(
        ENTRY, VllmSettings(), is_cpu=True, stats_path=tmp_path / "1.stats"
    )
    config = arguments["additional_config"]
    assert refusal_reason(config) is None
    error = refusal(config, "too small")

    assert str(error) == refusal_reason(config) == "too small"


def iteration(number: int) -> EngineIteration:
    return EngineIteration(
        compute_tokens=number,
        context_tokens=1,
        num_decodes=2,
        duration_s=0.5,
        prefill_pairs=number / 2,
    )


def test_iterations_and_load_arrive_through_shared_memory(tmp_path: Path) -> None:
    reader = StatsReader(tmp_path / "stats")
    writer = StatsWriter(tmp_path / "stats")
    load = EngineLoad(
        running=3,
        waiting=4,
        kv_utilization=0.25,
        kv_capacity_tokens=99,
        checkpoints=CheckpointTotals(
            saved_blocks=1,
            restored_blocks=2,
            saved_bytes=3 << 40,
            restored_bytes=4,
            save_s=0.5,
            restore_s=0.25,
        ),
        host_kv_bytes=7,
        host_kv_capacity_bytes=8,
    )
    for number in range(3):
        writer.write(iteration(number))
    assert reader.drain() == ()
    writer.publish(load)

    assert reader.drain() == (iteration(0), iteration(1), iteration(2))
    assert reader.drain() == ()
    assert reader.load() == load
    reader.limit(token_budget=64, max_running=5)
    assert writer.limits() == (64, 5)


def test_a_slow_reader_loses_the_oldest_iterations(tmp_path: Path) -> None:
    reader = StatsReader(tmp_path / "stats")
    writer = StatsWriter(tmp_path / "stats")
    for number in range(20_000):
        writer.write(iteration(number))
    writer.publish(EngineLoad(running=0, waiting=0, kv_utilization=0.0, kv_capacity_tokens=1))
    numbers = [each.compute_tokens for each in reader.drain()]

    assert 8000 < len(numbers) < 8193
    assert numbers == list(range(numbers[0], 20_000))


def publish_on(path: Path, load: EngineLoad, until: Any) -> None:
    """Publish *load* as the engine core does, in a separate process and without pauses."""
    core = StatsWriter(path)
    while not until.is_set():
        core.publish(load)


def test_unchanged_values_never_read_as_zero_during_a_write(tmp_path: Path) -> None:
    front = StatsReader(tmp_path / "stats")
    load = EngineLoad(
        running=1,
        waiting=2,
        kv_utilization=0.5,
        kv_capacity_tokens=3,
        checkpoints=CheckpointTotals(saved_blocks=4, restored_blocks=5),
    )
    spawn = multiprocessing.get_context("spawn")
    until = spawn.Event()
    writer = spawn.Process(target=publish_on, args=(tmp_path / "stats", load, until))
    writer.start()
    try:
        while front.load().kv_capacity_tokens == 0:
            assert writer.is_alive()
        seen = [front.load() for _ in range(5_000)]
    finally:
        until.set()
        writer.join()

    assert all(each == load for each in seen)
