"""Timing a shape: on a device with known times, and on the real CPU."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ops.profiling.fit import cells_of, errors_of, fitted
from ops.profiling.grid import Grid
from ops.profiling.shape_grid import ShapeGrid
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.errors import EngineError
from tests import requirements
from tests.shapes import TINY

torch = requirements.Late("torch")
shape_profiler = requirements.Late("ops.profiling.shape_profiler")
torch_device = requirements.Late("ops.profiling.torch_device")

GRID = ShapeGrid(
    grid=Grid(chunks=(16, 128), contexts=(32,), batches=(4,), repeats=2),
    prefill_contexts=(0, 256),
)


class KnownDevice:
    """A CPU device that reports the given times cyclically."""

    def __init__(self, times_s: tuple[float, ...] = (0.25,), **changes: int) -> None:
        self.device = torch.device("cpu")
        self.name = "known"
        self.cache_bytes = changes.get("cache_bytes", 1 << 20)
        self.free_bytes = changes.get("free_bytes", 1 << 30)
        self._times_s = times_s
        self.runs = 0

    def time_s(self, run: Callable[[], object]) -> float:
        run()
        self.runs += 1
        return self._times_s[(self.runs - 1) % len(self._times_s)]


def profiler(device: Any, *, overhead_s: float = 0.0, shape: Any = TINY):
    return shape_profiler.ShapeProfiler(shape, device, overhead_s=overhead_s, utilization=0.5)


def test_sample_is_the_median_of_its_passes_plus_the_overhead():
    # Each repeat takes three passes of each batch; one untimed pass of each warms up.
    device = KnownDevice((0.125,))
    batches = GRID.batches(TINY, print)
    known = iter([0.125] * len(batches) + [9.0, 0.25, 0.125] * 2 * len(batches))
    device.time_s = lambda run: (run(), next(known))[1]
    repeats = profiler(device, overhead_s=0.5).measure(GRID, print)

    assert [len(each) for each in repeats] == [len(batches)] * 2
    assert {sample.duration_s for repeat in repeats for sample in repeat} == {0.75}
    assert next(known, None) is None


def test_progress_and_the_rate_of_operations_are_reported():
    reported: list[str] = []
    profiler(KnownDevice()).measure(GRID, reported.append)

    most = max(each.flops(TINY) for each in GRID.batches(TINY, print)) / 0.25 / 1e12
    assert reported[0] == "9 batches, 3 of 3 layers with separate weights; warming up"
    assert reported[-1] == f"repeat 2 of 2, batch 9 of 9; at most {most:.3g} TFLOP/s"


@pytest.mark.parametrize(
    ("cache_bytes", "num_layers", "copies"),
    [
        # A layer of TINY takes 122,880 bytes.
        (0, 32, 2),
        (122_880, 32, 5),
        (1 << 40, 32, 32),
        (1 << 40, 3, 3),
        (0, 1, 1),
    ],
)
def test_enough_layers_have_weights_to_exceed_the_cache(
    cache_bytes: int, num_layers: int, copies: int
):
    shape = replace(TINY, num_layers=num_layers)
    device = KnownDevice(cache_bytes=cache_bytes)

    assert TINY.layer_bytes == 122_880
    assert profiler(device, shape=shape).num_copies == copies


def test_batches_whose_kv_does_not_fit_are_left_out_and_reported():
    # Half of the memory may be used: the weights of three layers, the table, and 300 tokens.
    weights = 3 * TINY.layer_bytes + TINY.table_bytes
    device = KnownDevice(free_bytes=2 * (weights + 300 * 3 * TINY.layer_kv_bytes_per_token))
    reported: list[str] = []
    repeats = profiler(device).measure(GRID, reported.append)

    # A chunk of 128 tokens after 256 does not fit, nor a chunk of 16 after 256 beside 4 decodes of
    # 33 tokens.
    assert (
        reported[0]
        == "left out for lack of room on the device: 3 of 9 batches, with over 300 tokens of KV"
    )
    assert len(repeats[0]) == 6
    assert max(each.before + each.chunk_tokens for each in repeats[0]) == 272


def test_device_without_room_for_a_prefill_is_refused_with_sizes():
    with pytest.raises(EngineError, match=r"known has too little memory: 3 layers of tiny"):
        profiler(KnownDevice(free_bytes=700_000)).measure(GRID, print)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            ("OutOfMemoryError", "2 GiB"),
            "known ran out of memory: use fewer --batches, .*: 2 GiB",
        ),
        (("AcceleratorError", "lost"), "known failed: lost"),
    ],
)
def test_device_failure_ends_the_measurement_with_its_message(
    error: tuple[str, str], reported: str
):
    device = KnownDevice()
    kind, message = error

    def fail(run: Callable[[], object]) -> float:
        raise getattr(torch, kind)(message)

    device.time_s = fail
    with pytest.raises(EngineError, match=reported):
        profiler(device).measure(GRID, print)


def test_profile_of_a_cpu_is_accepted_by_the_simulated_engine():
    """The profile has real times, which depend on the machine."""
    often = replace(GRID, grid=replace(GRID.grid, repeats=5))
    repeats = profiler(torch_device.find_device("cpu")).measure(often, print)
    samples = [each for repeat in repeats for each in repeat]
    latency = fitted(samples)
    cells = cells_of(samples, latency)
    # Other load only adds to a time, so the fastest describes the device best.
    fastest_s: dict[tuple[int, int, int], float] = {}
    for each in samples:
        kind = (each.num_decodes, each.chunk_tokens, each.before)
        fastest_s[kind] = min(fastest_s.get(kind, math.inf), each.duration_s)

    assert SimulatedSettings(latency=latency).latency == latency
    assert all(0 < each.duration_s < math.inf for each in samples)
    assert len(cells) == 9
    # A chunk of 128 tokens after 256 takes over ten times as many operations as 16 tokens alone.
    assert fastest_s[0, 128, 256] > fastest_s[0, 16, 0]
    errors = errors_of(repeats)
    assert errors is not None
    assert errors.count == len(repeats[-1])
