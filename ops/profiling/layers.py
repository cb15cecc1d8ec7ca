"""Layers of a model's shape with random weights, computed by plain torch."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from ops.profiling.model_shape import ModelShape
from ops.profiling.shape_grid import Batch

_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """The weights of one layer, and the KV to which the layer attends."""

    attention_norm: torch.Tensor
    """Weights of the norm before attention; shape: (hidden,)."""
    qkv: torch.Tensor
    """Weights of queries, keys and values; shape: (query width + 2 kv widths, hidden)."""
    output: torch.Tensor
    """Weights of the attention's output; shape: (hidden, query width)."""
    mlp_norm: torch.Tensor
    """Weights of the norm before the MLP; shape: (hidden,)."""
    gate_up: torch.Tensor
    """Weights of the MLP's gate and up projection; shape: (2 intermediate, hidden)."""
    down: torch.Tensor
    """Weights of the MLP's down projection; shape: (hidden, intermediate)."""
    keys: torch.Tensor
    """Keys of the KV; shape: (tokens, kv heads, head)."""
    values: torch.Tensor
    """Values of the KV; shape: (tokens, kv heads, head)."""


class LayerStack:
    """
    All layers of a model, computed in sequence with the weights of a few layers.

    Weights and KV are random, not zero: a GPU's clock depends on the data.

    Args:
        shape: Shape of the model.
        device: Device that computes.
        num_copies: Layers with separate weights, used in turn.
        kv_tokens: Maximum KV tokens of a batch in one layer.
        seed: Seed of the weights.
    """

    def __init__(
        self, shape: ModelShape, device: torch.device, *, num_copies: int, kv_tokens: int, seed: int
    ) -> None:
        self._shape = shape
        self._device = device
        self._dtype = getattr(torch, shape.dtype)
        self._random = torch.Generator(device=device).manual_seed(seed)
        self._table = self._matrix(shape.vocab_size, shape.hidden_size)
        self._norm = torch.ones(shape.hidden_size, dtype=self._dtype, device=device)
        self._copies = [self._copy(kv_tokens) for _ in range(num_copies)]

    def inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids of *batch*, decodes first, and the positions whose next token is computed."""
        ids = torch.randint(
            self._shape.vocab_size,
            (batch.tokens,),
            generator=self._random,
            device=self._device,
        )
        places = list(range(batch.num_decodes))
        if batch.chunk_tokens:
            places.append(batch.tokens - 1)
        return ids, torch.tensor(places, device=self._device)

    def run(self, batch: Batch, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """
        Compute the layers; return the logits of the next tokens, shape (requests, vocabulary).
        """
        with torch.inference_mode():
            hidden = functional.embedding(ids, self._table)
            for number in range(self._shape.num_layers):
                hidden = self._layer(self._copies[number % len(self._copies)], batch, hidden)
            hidden = self._normed(hidden.index_select(0, places), self._norm)
            return functional.linear(hidden, self._table)

    def _layer(self, copy: LayerCopy, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        qkv = functional.linear(self._normed(hidden, copy.attention_norm), copy.qkv)
        queries, keys, values = qkv.split([shape.query_width, shape.kv_width, shape.kv_width], -1)
        attended = [
            part(copy, batch, queries, keys, values)
            for part, there in (
                (self._decodes, batch.num_decodes),
                (self._prefill, batch.chunk_tokens),
            )
            if there
        ]
        together = attended[0] if len(attended) == 1 else torch.cat(attended)
        hidden = hidden + functional.linear(together, copy.output)
        gate, up = functional.linear(self._normed(hidden, copy.mlp_norm), copy.gate_up).chunk(2, -1)
        return hidden + functional.linear(functional.silu(gate) * up, copy.down)

    def _decodes(
        self,
        copy: LayerCopy,
        batch: Batch,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """
        Attention of the decodes: each decode has one query over its own KV, which head groups read
        once.
        """
        shape, number, context = self._shape, batch.num_decodes, batch.decode_context_tokens
        size = (number, context + 1, shape.num_kv_heads, shape.head_size)
        known_keys = copy.keys[: batch.decode_kv_tokens].view(size)
        known_values = copy.values[: batch.decode_kv_tokens].view(size)
        known_keys[:, context] = keys[:number].view(number, *size[2:])
        known_values[:, context] = values[:number].view(number, *size[2:])
        group = shape.num_heads // shape.num_kv_heads
        attended = functional.scaled_dot_product_attention(
            queries[:number].view(number, shape.num_kv_heads, group, shape.head_size),
            known_keys.transpose(1, 2),
            known_values.transpose(1, 2),
        )
        return attended.reshape(number, shape.query_width)

    def _prefill(
        self,
        copy: LayerCopy,
        batch: Batch,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """
        Attention of a chunk over its own tokens, causally, and over earlier tokens.

        Torch has no public function that combines the two parts of a softmax. Their sum takes equal
        time; its values differ, but the values do not matter here.
        """
        shape, first, before = self._shape, batch.num_decodes, batch.before_tokens
        begin = batch.decode_kv_tokens
        size = (batch.chunk_tokens, shape.num_kv_heads, shape.head_size)
        end = begin + batch.prefill_kv_tokens
        copy.keys[begin + before : end] = keys[first:].view(size)
        copy.values[begin + before : end] = values[first:].view(size)
        asked = queries[first:].view(batch.chunk_tokens, shape.num_heads, shape.head_size)
        attended = self._over(asked, copy, begin + before, end, is_causal=True)
        if before:
            attended = attended + self._over(asked, copy, begin, begin + before, is_causal=False)
        return attended.transpose(0, 1).reshape(batch.chunk_tokens, shape.query_width)

    def _over(
        self, queries: torch.Tensor, copy: LayerCopy, begin: int, end: int, *, is_causal: bool
    ) -> torch.Tensor:
        """Attention of one request over KV from *begin* to *end*; shape: (heads, chunk, head)."""
        return functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            copy.keys[begin:end].transpose(0, 1)[None],
            copy.values[begin:end].transpose(0, 1)[None],
            is_causal=is_causal,
            enable_gqa=self._shape.num_heads != self._shape.num_kv_heads,
        )[0]

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, (self._shape.hidden_size,), weight, _EPSILON)

    def _copy(self, kv_tokens: int) -> LayerCopy:
        shape = self._shape
        cache = (kv_tokens, shape.num_kv_heads, shape.head_size)
        return LayerCopy(
            attention_norm=self._norm,
            qkv=self._matrix(shape.query_width + 2 * shape.kv_width, shape.hidden_size),
            output=self._matrix(shape.hidden_size, shape.query_width),
            mlp_norm=self._norm,
            gate_up=self._matrix(2 * shape.intermediate_size, shape.hidden_size),
            down=self._matrix(shape.hidden_size, shape.intermediate_size),
            keys=self._random_tensor(*cache),
            values=self._random_tensor(*cache),
        )

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        """A random matrix with which multiplication keeps the magnitude of vectors."""
        return self._random_tensor(rows, columns).mul_(columns**-0.5)

    def _random_tensor(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._random, dtype=self._dtype, device=self._device)
