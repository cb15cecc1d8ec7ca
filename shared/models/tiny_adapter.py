"""Tiny LoRA adapters with random weights, in PEFT's format."""

from pathlib import Path

import msgspec

from shared.models.tiny_weights import TinyArchitecture, save_random_weights


class TinyAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter of the queries and values of a tiny model."""

    base: TinyArchitecture
    seed: int
    rank: int = 8
    alpha: int = 32

    def config(self) -> dict[str, object]:
        """Content of `adapter_config.json`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": ["q_proj", "v_proj"],
            "base_model_name_or_path": self.base.architecture,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weight name in the file -> shape of the weight."""
        base = self.base
        rows = {
            "q_proj": base.num_heads * base.head_size,
            "v_proj": base.num_kv_heads * base.head_size,
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(base.num_layers):
            for name, num_rows in rows.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                shapes[f"{prefix}.lora_A.weight"] = (self.rank, base.hidden_size)
                shapes[f"{prefix}.lora_B.weight"] = (num_rows, self.rank)
        return shapes


def make_tiny_adapter(directory: Path, adapter: TinyAdapter) -> Path:
    """
    Write an adapter to *directory*, which is created, and return it.

    Raises:
        ImportError: safetensors is not installed; it is installed with the engine.
    """
    directory.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(adapter.config()), indent=2)
    (directory / "adapter_config.json").write_bytes(content)
    path = directory / "adapter_model.safetensors"
    save_random_weights(path, adapter.shapes(), adapter.seed)
    return directory
