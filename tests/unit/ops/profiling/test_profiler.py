"""Measuring a live engine: the simulated engine, whose times are known."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ops.profiling.fit import cells_of, errors_of, fitted
from ops.profiling.grid import Grid, Sample
from ops.profiling.profiler import Profiler
from services.agent.backends.base import EngineIdentity
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError, SettingsError, UnsupportedError
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import Capability
from shared.runtime.clock import SystemClock
from solver.prediction.latency.iteration_fit import IterationWork
from solver.scheduling.engine.latency import LatencyTable

MODEL = ModelName("m")
TRUE = LatencyCoefficients(constant_s=0.004, linear_s=3e-5, attention_s=2e-8, context_s=3e-7)
GRID = Grid(chunks=(16, 128, 512), contexts=(64, 256), batches=(4,), repeats=2)
ENTRY = ModelEntry(name=MODEL, path="", architecture="none", max_model_len=2048)


@asynccontextmanager
async def profiler(**settings: object) -> AsyncIterator[Profiler]:
    values = {
        "latency": TRUE, "policy": "fcfs", "token_budget": 600, "max_running": 5,
        "time_scale": 0.01, "kv_capacity_tokens": 8192, "cold_activation_s": 0.0,
    }  # fmt: skip
    engine = SimulatedEngine([ENTRY], SimulatedSettings(**(values | settings)), SystemClock())
    await engine.start()
    try:
        await engine.activate(MODEL)
        yield Profiler(engine, MODEL, max_model_len=ENTRY.max_model_len)
    finally:
        await engine.close()


async def measured(reported: list[str], grid: Grid = GRID) -> list[list[Sample]]:
    async with profiler() as each:
        return await each.measure(grid, reported.append)


async def test_fit_matches_the_engine():
    repeats = await measured([])
    table = LatencyTable.from_coefficients(
        fitted([each for repeat in repeats for each in repeat]), max_tokens=600
    )
    true = LatencyTable.from_coefficients(TRUE, max_tokens=600)
    for tokens, before, others in ((16, 0, 0), (132, 384, 1000), (516, 512, 300), (4, 0, 1024)):
        work = (tokens, tokens * (before + tokens / 2), before + others)
        assert table.predict_s(*work) == pytest.approx(true.predict_s(*work), rel=0.1)

    errors = errors_of(repeats)
    assert errors is not None
    # Typical values are 0.02 and 0.045; the number of decodes in a repeat depends on the machine.
    assert (errors.count, errors.median < 0.05, errors.p95 < 0.1) == (len(repeats[-1]), True, True)


async def test_each_chunk_is_measured_alone_and_beside_batches_at_depths():
    repeats = await measured([])
    samples = [each for repeat in repeats for each in repeat]
    cells = cells_of(samples, TRUE)

    assert {
        (each.num_decodes, each.decode_context_tokens, each.chunk_tokens) for each in cells
    } >= {(0, 0, 16), (0, 0, 512), (4, 64, 0), (4, 256, 0), (4, 64, 128), (4, 256, 512)}
    alone = [each for each in cells if (each.num_decodes, each.chunk_tokens) == (0, 128)]
    assert [each.before_tokens for each in alone] == [128 * depth for depth in range(8)]
    assert sum(each.samples for each in cells) == len(samples)
    for each in cells:
        assert each.measured_s == pytest.approx(each.predicted_s, rel=0.05)


async def test_progress_is_reported_row_by_row():
    reported: list[str] = []
    await measured(reported)

    assert len(reported) == 6
    assert reported[0].startswith("repeat 1 of 2, row 1 of 3: beside 0 decodes of 0 tokens; ")
    assert reported[-1].startswith("repeat 2 of 2, row 3 of 3: beside 4 decodes of 256 tokens; ")


async def test_rows_that_do_not_fit_the_engine_are_left_out_and_reported():
    reported: list[str] = []
    async with profiler(kv_capacity_tokens=4096) as each:
        repeats = await each.measure(
            replace(GRID, batches=(4, 5), contexts=(512,)), reported.append
        )

    assert reported[:2] == [
        "left out for lack of room in the engine: 4 decodes of 512 tokens",
        "left out for lack of room in the engine: 5 decodes of 512 tokens",
    ]
    assert {each.num_decodes for each in repeats[0]} == {0}


@pytest.mark.parametrize("name", ["chunks", "contexts"])
async def test_chunks_or_contexts_that_do_not_fit_the_model_are_refused(name: str):
    grid = replace(GRID, **{name: (1793,)})
    async with profiler() as each:
        with pytest.raises(SettingsError, match=f"{name}: 1793 is above the limit of 1792 for m"):
            await each.measure(grid, print)


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"chunks": ()}, "chunks: all values must be at least 1"),
        ({"batches": (0,)}, "batches: all values must be at least 1"),
        (
            {"repeats": 1},
            "repeats must be at least 2, since the last repeat is used for validation: 1",
        ),
    ],
)
def test_invalid_grid_is_refused(fields: dict[str, object], reported: str):
    with pytest.raises(SettingsError, match=reported):
        replace(GRID, **fields)


async def test_engine_without_telemetry_is_refused():
    class Silent(SimulatedEngine):
        @property
        def identity(self) -> EngineIdentity:
            return EngineIdentity(
                engine="silent", device="cpu", capabilities=frozenset({Capability.SCHEDULING})
            )

    engine = Silent([ENTRY], SimulatedSettings(), SystemClock())
    with pytest.raises(UnsupportedError, match="silent cannot be profiled: it lacks telemetry"):
        Profiler(engine, MODEL, max_model_len=2048)


async def test_death_of_the_engine_ends_the_measurement():
    async with profiler(crash_on_token=17) as each:
        with pytest.raises(EngineError, match="the engine died"):
            await each.measure(GRID, print)


def test_one_pause_does_not_change_the_fit():
    work = [IterationWork(n, n * n / 2, 0) for n in (16, 64, 256, 512)] * 10
    samples = [Sample(each, 0, 0, 0, 0.01 + 1e-4 * each.tokens) for each in work]
    paused = [*samples, Sample(work[0], 0, 0, 0, 5.0)]

    one, other = (
        LatencyTable.from_coefficients(fitted(s), max_tokens=512) for s in (samples, paused)
    )
    assert other.predict_s(64, 2048, 0) == pytest.approx(one.predict_s(64, 2048, 0), rel=0.02)


@pytest.mark.parametrize("pace", [0.01, 1.0, 1000.0])
def test_engines_of_any_speed_are_fitted_equally_well(pace: float):
    """Iterations take from 1 ms to 10 s."""
    work = [IterationWork(n, n * n / 2, 0) for n in (16, 64, 256, 512)] * 3
    samples = [Sample(each, 0, 0, 0, pace * (0.01 + 1e-4 * each.tokens)) for each in work]

    table = LatencyTable.from_coefficients(fitted(samples), max_tokens=512)
    for tokens in (16, 100, 512):
        predicted_s = table.predict_s(tokens, tokens * tokens / 2, 0)
        assert predicted_s == pytest.approx(pace * (0.01 + 1e-4 * tokens), rel=0.02)
