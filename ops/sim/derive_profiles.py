"""
Latency profiles from measured operator times.

Input is the MLP profile that the Vidur simulator publishes per device and model
(`data/profiling/compute/<device>/<model>/mlp.csv`): median milliseconds per layer and token
count. The time of an iteration is the sum of the layers' times, of an LM head that reads its
weights, of an engine overhead, and of attention computed from FLOPs and bytes. Published figures
fix the calibrations:

- A100: small chunks cost 28 % of throughput by QoServe §1, but a factor of 2 by §4.1.4. One engine
  cannot satisfy both statements: calibration `28` satisfies the first and `2x` the second; `raw` is
  the operator profile with the overhead of an asynchronous engine.
- H100: ConServe's times of 2048 tokens without context (51 ms) and after 40,000 tokens (124 ms).
"""

import argparse
import csv
import statistics
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ops.sim.profiles import DIRECTORY, ProfileData

_LAYERS = 32
_HIDDEN = 4096
_KV_BYTES = 32 * 2 * 8 * 128 * 2
"""
KV bytes per token of Llama-3-8B: product of layers, keys and values, KV heads, head size, bytes.
"""
_HEAD_BYTES = 128256 * _HIDDEN * 2
_PAIR_FLOP = 4 * _HIDDEN * _LAYERS
_OPERATORS = ("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj",
              "post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj")  # fmt: skip
_LARGEST_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Parameters of an iteration's time that the operator profile does not contain."""

    name: str
    device: str
    scale: float
    overhead_s: float
    attention_flops: float
    kv_bytes_per_s: float
    kv_capacity_tokens: int


CALIBRATIONS = {
    "a100": (
        Calibration(name="a100-llama3-8b-28", device="A100-80GB", scale=1.3, overhead_s=0.003,
                    attention_flops=120e12, kv_bytes_per_s=1.2e12, kv_capacity_tokens=400_000),
        Calibration(name="a100-llama3-8b-2x", device="A100-80GB", scale=1.0, overhead_s=0.012,
                    attention_flops=150e12, kv_bytes_per_s=1.5e12, kv_capacity_tokens=400_000),
        Calibration(name="a100-llama3-8b-raw", device="A100-80GB", scale=1.0, overhead_s=0.002,
                    attention_flops=150e12, kv_bytes_per_s=1.5e12, kv_capacity_tokens=400_000),
    ),
    # Times of Llama-2-7B's profile, scaled by the ratio of the weights that an iteration reads.
    "h100": (
        Calibration(name="h100-llama3-8b", device="H100-80GB", scale=6.98 / 6.48,
                    overhead_s=0.004, attention_flops=590e12, kv_bytes_per_s=2.7e12,
                    kv_capacity_tokens=400_000),
    ),
}  # fmt: skip


def layer_s(file: Path) -> dict[int, float]:
    """Seconds of one layer's operators on one device by token count; attention is left out."""
    by_tokens: dict[int, list[float]] = {}
    with file.open(newline="", encoding="utf-8-sig") as lines:
        for row in csv.DictReader(lines):
            if row["num_tensor_parallel_workers"] != "1":
                continue
            parts = [float(row[f"time_stats.{name}.median"] or 0) for name in _OPERATORS]
            residual = 2 * float(row["time_stats.add.median"] or 0)
            by_tokens.setdefault(int(row["num_tokens"]), []).append(sum(parts) + residual)
    return {tokens: statistics.mean(ms) / 1000 for tokens, ms in by_tokens.items()}


def profile(layer: dict[int, float], calibration: Calibration) -> ProfileData:
    """Times of whole iterations, computed from the times *layer* of one layer."""
    tokens = sorted(n for n in layer if n <= _LARGEST_TOKENS)
    return ProfileData(
        name=calibration.name,
        model="llama-3-8b",
        device=calibration.device,
        tokens=tuple(tokens),
        microseconds=tuple(round(1e6 * calibration.scale * _LAYERS * layer[n]) for n in tokens),
        overhead_s=calibration.overhead_s + _HEAD_BYTES / calibration.kv_bytes_per_s,
        pair_s=_PAIR_FLOP / calibration.attention_flops,
        context_s=_KV_BYTES / calibration.kv_bytes_per_s,
        kv_capacity_tokens=calibration.kv_capacity_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.sim.derive_profiles", description=__doc__)
    parser.add_argument("device", choices=sorted(CALIBRATIONS))
    parser.add_argument("--mlp", type=Path, required=True, help="operator profile, CSV")
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    options = parser.parse_args()
    layer = layer_s(options.mlp)
    for calibration in CALIBRATIONS[options.device]:
        file = options.out / f"{calibration.name}.json"
        file.write_bytes(msgspec.json.encode(profile(layer, calibration)) + b"\n")
        print(file)


if __name__ == "__main__":
    main()
