"""Iterations of a shape that are timed."""

from dataclasses import replace

import pytest

from ops.profiling.grid import Grid
from ops.profiling.shape_grid import Batch, ShapeGrid
from shared.contracts.errors import SettingsError
from tests.shapes import TINY

GRID = ShapeGrid(
    grid=Grid(chunks=(16, 256), contexts=(64,), batches=(2, 8), repeats=2),
    prefill_contexts=(0, 300),
)


def test_each_chunk_is_timed_at_each_depth_alone_and_beside_batches():
    reported: list[str] = []
    batches = GRID.batches(TINY, reported.append)
    kinds = {(each.num_decodes, each.chunk_tokens, each.before_tokens) for each in batches}

    # A chunk of 256 tokens after 300 tokens exceeds the model's limit of 512.
    chunks = {(16, 0), (16, 300), (256, 0)}
    assert kinds == {(n, *chunk) for n in (0, 2, 8) for chunk in chunks} | {(2, 0, 0), (8, 0, 0)}
    assert len(kinds) == len(batches)
    assert {each.decode_context_tokens for each in batches if each.num_decodes} == {64}
    assert reported == []


def test_depths_beyond_the_model_are_left_out_and_reported():
    reported: list[str] = []
    grid = replace(GRID, prefill_contexts=(0, 497, 1000))
    assert {each.before_tokens for each in grid.batches(TINY, reported.append)} == {0}
    assert reported == [
        "left out, since max_position_embeddings is 512: chunks after contexts of 497, 1000 tokens"
    ]


def test_batch_equals_the_work_that_an_engine_would_report():
    batch = Batch(num_decodes=3, decode_context_tokens=100, chunk_tokens=10, before_tokens=40)
    sample = batch.sample(0.5)

    assert (sample.work.tokens, sample.work.pairs, sample.work.context_tokens) == (13, 450, 340)
    assert (sample.chunk_tokens, sample.before, sample.duration_s) == (10, 40, 0.5)
    assert (batch.decode_kv_tokens, batch.prefill_kv_tokens, batch.num_requests) == (303, 50, 4)


def test_flops_count_matrices_and_attention():
    batch = Batch(num_decodes=0, decode_context_tokens=0, chunk_tokens=10, before_tokens=5)
    # By hand: q and o 64x64, k and v 64x32, the MLP 3 times 64x96; 100 pairs, by q·k and p·v of
    # 64 numbers each; the LM head once.
    layer = 2 * 10 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 2 * 2 * 100 * 64
    assert batch.flops(TINY) == 3 * layer + 2 * 128 * 64


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"prefill_contexts": ()}, "prefill_contexts: all values must be at least 0"),
        ({"prefill_contexts": (0, -1)}, "prefill_contexts: all values must be at least 0"),
        ({"passes": 0}, "passes must be at least 1: 0"),
    ],
)
def test_invalid_grid_of_a_shape_is_refused(changes: dict[str, object], reported: str):
    with pytest.raises(SettingsError, match=reported):
        replace(GRID, **changes)


@pytest.mark.parametrize(("name", "value", "room"), [("chunks", 513, 512), ("contexts", 512, 511)])
def test_values_beyond_the_shapes_limit_are_refused(name: str, value: int, room: int):
    grid = replace(GRID, grid=replace(GRID.grid, **{name: (value,)}))
    reported = f"{name}: {value} is above the limit of {room} for tiny: its max_position_embeddings"
    with pytest.raises(SettingsError, match=reported):
        grid.batches(TINY, print)
