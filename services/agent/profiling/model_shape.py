"""What of a decoder-only transformer decides how long its layers take."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["bfloat16", "float16", "float32"]
_BYTES: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """
    Dense layers with grouped-query attention and a gated MLP, as in Llama.

    Biases and rotary embeddings are left out: they take next to nothing.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Divides `num_heads`."""
    head_size: int
    vocab_size: int
    max_tokens: int
    """Prompt and answer at most."""
    max_tokens_field: str
    """Of `config.json`, that says so."""
    dtype: DType

    @property
    def query_width(self) -> int:
        """Of all heads."""
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Of the keys of one token, and of its values."""
        return self.num_kv_heads * self.head_size

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""
        attention = self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_bytes(self) -> int:
        """Of these matrices."""
        return _BYTES[self.dtype] * self.layer_weights

    @property
    def table_bytes(self) -> int:
        """Of the embeddings; as many in the LM head."""
        return _BYTES[self.dtype] * self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Of the whole model, its LM head not tied to the embeddings."""
        return self.num_layers * self.layer_bytes + 2 * self.table_bytes

    @property
    def layer_kv_bytes_per_token(self) -> int:
        """Keys and values, in one layer."""
        return 2 * _BYTES[self.dtype] * self.kv_width

    def flops(self, *, tokens: int, pairs: float, answers: int) -> float:
        """
        Multiplications and additions of one iteration.

        Args:
            tokens: Computed.
            pairs: Of a token and one that it attends to, of prefills and decodes.
            answers: Requests whose next token is wanted.
        """
        layer = 2.0 * tokens * self.layer_weights + 4.0 * pairs * self.query_width
        return self.num_layers * layer + 2.0 * answers * self.vocab_size * self.hidden_size

    def kv_capacity_tokens(self, *, free_bytes: int, utilization: float) -> int:
        """
        Tokens of KV beside all weights in *utilization* of a device's *free_bytes*.

        As vLLM has it, but for what an iteration needs besides. 0 if the weights do not fit.
        """
        room = utilization * free_bytes - self.weight_bytes
        return max(0, int(room / (self.num_layers * self.layer_kv_bytes_per_token)))
