"""Shape of a decoder-only transformer: the fields that determine the time of its layers."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["bfloat16", "float16", "float32"]
_BYTES: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """
    Shape of a model with dense layers, grouped-query attention and a gated MLP, as in Llama.

    Biases and rotary embeddings are omitted, because their time is negligible.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Number of KV heads, which must divide `num_heads`."""
    head_size: int
    vocab_size: int
    max_tokens: int
    """Maximum number of tokens of prompt and answer."""
    max_tokens_field: str
    """Name of the field in `config.json` that contains the limit `max_tokens`."""
    dtype: DType

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Width of one token's keys, which is also the width of its values."""
        return self.num_kv_heads * self.head_size

    @property
    def layer_weights(self) -> int:
        """Number of parameters in the matrices of one layer."""
        attention = self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_bytes(self) -> int:
        """Size of the matrices of one layer in bytes."""
        return _BYTES[self.dtype] * self.layer_weights

    @property
    def table_bytes(self) -> int:
        """Size of the embeddings in bytes; the LM head has the same size."""
        return _BYTES[self.dtype] * self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Size of the whole model in bytes, with an LM head that is not tied to the embeddings."""
        return self.num_layers * self.layer_bytes + 2 * self.table_bytes

    @property
    def layer_kv_bytes_per_token(self) -> int:
        """Size of the keys and values of one token in one layer, in bytes."""
        return 2 * _BYTES[self.dtype] * self.kv_width

    def flops(self, *, tokens: int, pairs: float, answers: int) -> float:
        """
        Number of multiplications and additions of one iteration.

        Args:
            tokens: Computed tokens.
            pairs: Pairs of a token and a token that it attends to, of prefills and decodes.
            answers: Number of requests whose next token is computed.
        """
        layer = 2.0 * tokens * self.layer_weights + 4.0 * pairs * self.query_width
        return self.num_layers * layer + 2.0 * answers * self.vocab_size * self.hidden_size

    def kv_capacity_tokens(self, *, free_bytes: int, utilization: float) -> int:
        """
        Number of tokens whose KV fits, together with all weights, into the share *utilization* of a
        device's *free_bytes*.

        Computed as by vLLM, but without the memory that an iteration needs. 0 if the weights do not
        fit.
        """
        room = utilization * free_bytes - self.weight_bytes
        return max(0, int(room / (self.num_layers * self.layer_kv_bytes_per_token)))
