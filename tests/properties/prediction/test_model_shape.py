"""Operations and memory of a model's shape."""

from hypothesis import given
from hypothesis import strategies as st

from ops.profiling.model_shape import ModelShape
from ops.profiling.shape_grid import Batch

SIZES = st.integers(min_value=1, max_value=4096)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads = draw(st.integers(min_value=1, max_value=16))
    return ModelShape(
        name="any",
        hidden_size=draw(SIZES),
        intermediate_size=draw(SIZES),
        num_layers=draw(st.integers(min_value=1, max_value=80)),
        num_heads=kv_heads * draw(st.integers(min_value=1, max_value=8)),
        num_kv_heads=kv_heads,
        head_size=draw(st.integers(min_value=1, max_value=256)),
        vocab_size=draw(SIZES),
        max_tokens=8192,
        max_tokens_field="max_position_embeddings",
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    decodes, chunk = draw(st.integers(0, 64)), draw(st.integers(0, 4096))
    return Batch(
        num_decodes=decodes,
        decode_context_tokens=draw(st.integers(0, 4096)) if decodes else 0,
        chunk_tokens=chunk,
        before_tokens=draw(st.integers(0, 4096)) if chunk else 0,
    )


def more(batch: Batch, *, decodes: int, context: int, chunk: int, before: int) -> Batch:
    return Batch(
        num_decodes=batch.num_decodes + decodes,
        decode_context_tokens=batch.decode_context_tokens + context,
        chunk_tokens=batch.chunk_tokens + chunk,
        before_tokens=batch.before_tokens + before,
    )


@given(shapes(), batches(), st.data())
def test_more_work_never_counts_as_fewer_operations(
    shape: ModelShape, batch: Batch, data: st.DataObject
):
    """More tokens, contexts or requests, separately and together, take more operations."""
    steps = {name: data.draw(st.integers(0, 100)) for name in ("decodes", "context", "chunk")}
    larger = more(batch, before=data.draw(st.integers(0, 100)), **steps)

    assert larger.flops(shape) >= batch.flops(shape)
    if larger.tokens > batch.tokens:
        assert larger.flops(shape) > batch.flops(shape)


@given(shapes(), st.integers(0, 1 << 40), st.floats(0.01, 1.0))
def test_kv_and_weights_fit_the_allowed_memory(
    shape: ModelShape, free_bytes: int, utilization: float
):
    tokens = shape.kv_capacity_tokens(free_bytes=free_bytes, utilization=utilization)
    per_token = shape.num_layers * shape.layer_kv_bytes_per_token
    room = utilization * free_bytes - shape.weight_bytes

    assert tokens >= 0
    assert tokens == 0 or tokens * per_token <= room
    assert (tokens + 1) * per_token > room * (1 - 1e-12)


@given(shapes(), batches())
def test_a_batch_reports_all_of_its_tokens_and_no_decode_as_a_prefill(
    shape: ModelShape, batch: Batch
):
    sample = batch.sample(1.0)

    assert sample.work.tokens == batch.num_decodes + batch.chunk_tokens
    assert sample.chunk_tokens == batch.chunk_tokens
    assert (sample.work.pairs == 0) == (batch.chunk_tokens == 0)
    assert batch.flops(shape) > 0 or batch.tokens == 0
