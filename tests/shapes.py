"""Model shapes so small that a CPU times them quickly."""

from ops.profiling.model_shape import ModelShape

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}

TINY = ModelShape(
    name="tiny",
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=128,
    max_tokens=512,
    max_tokens_field="max_position_embeddings",
    dtype="float32",
)
"""The shape in `CONFIG`."""
