"""Layer-wise preemption in vLLM, without vLLM: droppable parts, and supported engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.arguments import (
    engine_arguments,
    safepoint_layers,
    without_safepoints,
)
from services.agent.backends.vllm.front.backend import VllmEngine
from services.agent.backends.vllm.front.process import host_environment
from services.agent.backends.vllm.shared.preemptible_work import DroppablePart, droppable_parts
from services.agent.backends.vllm.shared.safepoint_support import (
    safepoint_places,
    safepoint_refusal,
)
from services.agent.backends.vllm.shared.workers import CPU_WORKER, SAFEPOINT_WORKERS
from shared.contracts.base import ModelName
from shared.contracts.errors import UnsupportedError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import Capability

ENTRY = ModelEntry(name=ModelName("m"), path="m", architecture="x", max_model_len=64)


def vllm_request(computed: int, *, until: float = 10.0) -> Any:
    return SimpleNamespace(num_computed_tokens=computed, headway_droppable_until=until)


class TestDroppable:
    """Parts of an iteration that may be dropped at 5 s, with blocks of 4 tokens."""

    def parts(
        self,
        num_scheduled: dict[str, int],
        requests: dict[str, Any],
        blocks: dict[str, list[int]],
        admitted: tuple[str, ...] = (),
    ) -> list[DroppablePart]:
        return droppable_parts(
            num_scheduled,
            requests,
            lambda name, index: blocks[name][index:],
            admitted=admitted,
            block_tokens=4,
            now=5.0,
        )

    def test_best_effort_parts_list_the_blocks_left_incomplete(self) -> None:
        parts = self.parts(
            {"chat": 1, "batch": 8},
            {"chat": vllm_request(9, until=-1.0), "batch": vllm_request(14)},
            {"chat": [1, 2, 3], "batch": [4, 5, 6, 7]},
        )

        assert parts == [DroppablePart("batch", 6, (5, 6, 7))]

    def test_aged_best_effort_work_is_not_dropped(self) -> None:
        assert self.parts({"old": 4}, {"old": vllm_request(4, until=4.0)}, {"old": [1]}) == []

    def test_request_that_shares_a_dropped_block_is_also_dropped(self) -> None:
        """Two shared blocks count as computed, but the second block is only scheduled."""
        requests = {"batch": vllm_request(8), "chat": vllm_request(10, until=-1.0)}
        blocks = {"batch": [1, 2], "chat": [1, 2, 3]}
        parts = self.parts({"batch": 4, "chat": 2}, requests, blocks, admitted=("chat",))

        assert parts == [
            DroppablePart("batch", 4, (2,)),
            DroppablePart("chat", 8, (3,), depends=True),
        ]

    def test_request_that_shares_only_computed_blocks_stays(self) -> None:
        requests = {"batch": vllm_request(8), "chat": vllm_request(6, until=-1.0)}
        blocks = {"batch": [1, 2], "chat": [1, 3]}
        parts = self.parts({"batch": 4, "chat": 2}, requests, blocks, admitted=("chat",))

        assert [part.request_id for part in parts] == ["batch"]


def config(**fields: Any) -> Any:
    """A `VllmConfig` that can have safepoints, except for *fields*, named `part__name`."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
        },
        "scheduler_config": {"async_scheduling": False},
        "model_config": {
            "enforce_eager": True,
            "is_multimodal_model": False,
            "is_hybrid": False,
            "has_inner_state": False,
            "is_encoder_decoder": False,
        },
    }
    whole = {"use_v2_model_runner": False, "speculative_config": None, "lora_config": None}
    for name, value in fields.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            whole[part] = value
    return SimpleNamespace(
        **whole, **{part: SimpleNamespace(**values) for part, values in parts.items()}
    )


class TestStart:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"scheduler_config__async_scheduling": True}, "asynchronous"),
            ({"parallel_config__tensor_parallel_size": 2}, "tensor parallelism"),
            ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
            ({"parallel_config__data_parallel_size": 2}, "data parallelism"),
            ({"model_config__enforce_eager": False}, "captured graphs"),
            ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
            ({"speculative_config": object()}, "speculative"),
            ({"lora_config": object()}, "LoRA"),
            ({"model_config__is_multimodal_model": True}, "multimodal"),
            ({"model_config__is_hybrid": True}, "hybrid"),
            ({"model_config__has_inner_state": True}, "recurrent"),
            ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ],
    )
    def test_untested_configuration_is_refused_with_a_remedy(
        self, fields: dict[str, Any], reason: str
    ) -> None:
        refusal = safepoint_refusal(config(**fields))

        assert refusal is not None
        assert reason in refusal
        assert "safepoint_layers" in refusal

    def test_eager_synchronous_engine_on_one_device_is_accepted(self) -> None:
        assert safepoint_refusal(config()) is None

    @pytest.mark.parametrize(
        ("num_layers", "every", "places"),
        [
            (32, 4, [0, 4, 8, 12, 16, 20, 24, 28]),
            (4, 4, [0, 2]),
            (3, 4, [0, 2]),
            (2, 4, [0, 1]),
            (1, 4, [0]),
            (6, 1, [0, 1, 2, 3, 4, 5]),
        ],
    )
    def test_every_model_has_an_inner_safepoint(
        self, num_layers: int, every: int, places: list[int]
    ) -> None:
        assert list(safepoint_places(num_layers, every)) == places

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            (VllmSettings(), 4),
            (VllmSettings(safepoint_layers=8), 8),
            (VllmSettings(safepoint_layers=0), 0),
            (VllmSettings(eager=False), 0),
            (VllmSettings(async_scheduling=True), 0),
            (VllmSettings(async_scheduling=True, safepoint_layers=4), 4),
            (VllmSettings(policy="stock"), 0),
            (VllmSettings(policy="fcfs"), 0),
        ],
        ids=["default", "set", "off", "graphs", "async", "async, set", "stock", "fixed chunk"],
    )
    def test_safepoints_are_on_with_qoserve_unless_turned_off(
        self, settings: VllmSettings, tmp_path: Path, expected: int
    ) -> None:
        arguments = engine_arguments(ENTRY, settings, is_cpu=True, stats_path=tmp_path / "1.stats")

        assert safepoint_layers(settings, is_cpu=True) == expected
        assert arguments["worker_cls"] == (SAFEPOINT_WORKERS[True] if expected else CPU_WORKER)
        pinned = "VLLM_USE_V2_MODEL_RUNNER" in host_environment(settings, tmp_path)
        assert pinned == bool(settings.safepoint_layers)

    @pytest.mark.parametrize(("is_cpu", "worker"), [(True, CPU_WORKER), (False, "auto")])
    def test_engine_without_safepoints_keeps_its_policy(
        self, tmp_path: Path, *, is_cpu: bool, worker: str
    ) -> None:
        settings = VllmSettings(safepoint_layers=4)
        arguments = engine_arguments(
            ENTRY, settings, is_cpu=is_cpu, stats_path=tmp_path / "1.stats"
        )
        without = without_safepoints(arguments)

        assert arguments["worker_cls"] == SAFEPOINT_WORKERS[is_cpu]
        assert without["worker_cls"] == worker
        assert without["scheduler_cls"].endswith(".PolicyScheduler")

    async def test_backend_without_safepoints_refuses_preemption(self) -> None:
        engine = VllmEngine((), VllmSettings(policy="stock"))

        assert Capability.LAYER_PREEMPTION not in engine.identity.capabilities
        with pytest.raises(UnsupportedError):
            await engine.preempt_now()

    async def test_preemption_without_a_model_finds_no_running_work(self) -> None:
        engine = VllmEngine((), VllmSettings())

        assert Capability.LAYER_PREEMPTION in engine.identity.capabilities
        assert await engine.preempt_now() is False
