"""Layers of a shape compute the same as a decoder's layers."""

import math

import pytest

from ops.profiling.shape_grid import Batch
from tests import requirements
from tests.shapes import TINY

torch = requirements.Late("torch")
layers = requirements.Late("ops.profiling.layers")
functional = requirements.Late("torch.nn.functional")

KV_TOKENS = 200


def stack(num_copies: int = 2):
    return layers.LayerStack(
        TINY, torch.device("cpu"), num_copies=num_copies, kv_tokens=KV_TOKENS, seed=3
    )


def attention(queries, keys, values, mask):
    """Attention by its formula; queries are (tokens, heads, head), keys have fewer heads."""
    keys, values = (each.repeat_interleave(2, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(TINY.head_size)
    shares = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", shares, values)


def expected(stack, batch: Batch, ids, places):
    """The logits of *batch*, computed separately for each request."""
    hidden = stack._table[ids]
    for number in range(TINY.num_layers):
        copy = stack._copies[number % len(stack._copies)]
        normed = functional.rms_norm(hidden, (64,), copy.attention_norm, 1e-5)
        queries, keys, values = (normed @ copy.qkv.T).split([64, 32, 32], dim=-1)
        queries = queries.view(-1, 4, 16)
        keys, values = keys.view(-1, 2, 16), values.view(-1, 2, 16)
        parts = []
        width = batch.decode_context_tokens + 1
        for place in range(batch.num_decodes):
            known = slice(place * width, (place + 1) * width - 1)
            parts.append(
                attention(
                    queries[place : place + 1],
                    torch.cat([copy.keys[known], keys[place : place + 1]]),
                    torch.cat([copy.values[known], values[place : place + 1]]),
                    torch.ones(1, width, dtype=torch.bool),
                )
            )
        first, chunk = batch.num_decodes, batch.chunk_tokens
        if chunk:
            causal = torch.ones(chunk, chunk, dtype=torch.bool).tril()
            own = attention(queries[first:], keys[first:], values[first:], causal)
            if batch.before_tokens:
                known = slice(batch.decode_kv_tokens, batch.decode_kv_tokens + batch.before_tokens)
                all_of_it = torch.ones(chunk, batch.before_tokens, dtype=torch.bool)
                # Attention over the chunk and attention over earlier tokens are added, as
                # documented in `LayerStack._prefill`.
                own = own + attention(
                    queries[first:], copy.keys[known], copy.values[known], all_of_it
                )
            parts.append(own)
        hidden = hidden + torch.cat(parts).reshape(batch.tokens, 64) @ copy.output.T
        normed = functional.rms_norm(hidden, (64,), copy.mlp_norm, 1e-5)
        gate, up = (normed @ copy.gate_up.T).chunk(2, dim=-1)
        hidden = hidden + (functional.silu(gate) * up) @ copy.down.T
    return functional.rms_norm(hidden[places], (64,), None, 1e-5) @ stack._table.T


@pytest.mark.parametrize(
    "batch",
    [
        Batch(num_decodes=0, decode_context_tokens=0, chunk_tokens=40, before_tokens=0),
        Batch(num_decodes=0, decode_context_tokens=0, chunk_tokens=1, before_tokens=0),
        Batch(num_decodes=3, decode_context_tokens=20, chunk_tokens=0, before_tokens=0),
        Batch(num_decodes=3, decode_context_tokens=20, chunk_tokens=30, before_tokens=0),
        Batch(num_decodes=1, decode_context_tokens=1, chunk_tokens=30, before_tokens=70),
    ],
    ids=["prefill", "one token", "decodes", "both", "a chunk behind others"],
)
def test_logits_equal_a_decoders_logits(batch: Batch):
    computing = stack()
    ids, places = computing.inputs(batch)

    logits = computing.run(batch, ids, places)
    assert logits.shape == (batch.num_requests, TINY.vocab_size)
    torch.testing.assert_close(
        logits, expected(computing, batch, ids, places), rtol=1e-4, atol=1e-4
    )


def test_layers_reuse_the_available_weights_in_turn():
    """The third of three layers uses the first layer's weights, as in `expected`."""
    batch = Batch(num_decodes=0, decode_context_tokens=0, chunk_tokens=8, before_tokens=0)
    few, many = stack(1), stack(3)
    ids, places = few.inputs(batch)

    assert len({id(each.qkv) for each in many._copies}) == TINY.num_layers
    assert not torch.equal(many._copies[0].qkv, many._copies[1].qkv)
    torch.testing.assert_close(
        few.run(batch, ids, places), expected(few, batch, ids, places), rtol=1e-4, atol=1e-4
    )


def test_the_same_seed_gives_the_same_weights():
    assert torch.equal(stack()._table, stack()._table)


def test_weights_have_the_counted_sizes():
    copy = stack()._copies[0]
    matrices = (copy.qkv, copy.output, copy.gate_up, copy.down)

    assert sum(each.numel() * each.element_size() for each in matrices) == TINY.layer_bytes
    assert stack()._table.numel() * 4 == TINY.table_bytes
    kv_bytes = sum(each.numel() * each.element_size() for each in (copy.keys, copy.values))
    assert kv_bytes == KV_TOKENS * TINY.layer_kv_bytes_per_token
