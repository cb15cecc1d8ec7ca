"""Latency profiles shipped with the project."""

from pathlib import Path

import msgspec
import pytest

from ops.sim import derive_profiles
from ops.sim.profiles import ALIASES, load, names
from shared.contracts.base import ModelName
from shared.contracts.estimates import LatencyCoefficients, Profile


def ms(name: str, tokens: int, *, before: int = 0) -> float:
    return 1000 * load(name).latency.predict_s(tokens, tokens * (before + tokens / 2), before)


@pytest.mark.parametrize("name", [*ALIASES, *names()])
def test_every_profile_is_usable(name: str) -> None:
    profile = load(name)

    assert list(profile.latency.tokens_s) == sorted(profile.latency.tokens_s)
    assert profile.latency.max_tokens == 8192
    assert profile.kv_capacity_tokens > 100_000


def test_h100_gives_conserves_published_times() -> None:
    # 2048 tokens without context take 51 ms, after 40,000 they take 124 ms.
    assert ms("h100", 2048) == pytest.approx(51, rel=0.03)
    assert ms("h100", 2048, before=40_000) == pytest.approx(124, rel=0.03)


def test_calibrations_differ_in_the_cost_of_small_chunks() -> None:
    gains = {name: (2432 / ms(name, 2432)) / (256 / ms(name, 256)) for name in ("28", "2x", "raw")}

    assert gains["raw"] < gains["28"] < gains["2x"]


def test_the_tile_step_is_in_the_table() -> None:
    assert ms("28", 264) / ms("28", 256) > 1.2


def test_a_fitted_profile_is_read(tmp_path: Path) -> None:
    fitted = Profile(
        model=ModelName("m"),
        engine="vllm",
        device="cpu",
        version=1,
        at=0.0,
        latency=LatencyCoefficients(constant_s=0.01, linear_s=1e-4),
    )
    file = tmp_path / "fitted.json"
    file.write_bytes(msgspec.json.encode(fitted))

    assert load(str(file)).latency.predict_s(100, 0, 0) == pytest.approx(0.02)


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON"), (None, "no profile")])
def test_an_invalid_profile_is_rejected(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "profile.json"
    if content is not None:
        file.write_text(content)

    with pytest.raises(ValueError, match=message):
        load(str(file))


def test_profiles_are_derived_from_operator_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = [*derive_profiles._OPERATORS, "add"]
    header = [f"time_stats.{name}.median" for name in operators]
    header += ["num_tokens", "num_tensor_parallel_workers"]
    rows = [[0.01] * 9 + [1, 1], [0.03] * 9 + [8, 1], [9.0] * 9 + [8, 2]]
    mlp = tmp_path / "mlp.csv"
    mlp.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]) + "\n")
    monkeypatch.setattr("sys.argv", ["derive", "h100", "--mlp", str(mlp), "--out", str(tmp_path)])
    derive_profiles.main()
    derived = load(str(tmp_path / "h100-llama3-8b.json"))

    # Ten operators of 30 us, 32 layers, and the ratio of the two models' weights.
    layers_s = 10 * 30e-6 * 32 * 6.98 / 6.48
    overhead_s = 0.004 + 128256 * 4096 * 2 / 2.7e12
    assert derived.latency.tokens_s[8] == pytest.approx(layers_s + overhead_s, rel=1e-3)
