"""Workloads: arrivals, lengths, traces, classes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.sim.arrivals import gamma, poisson, square_wave
from ops.sim.lengths import MIXES, TARGETS, LengthModel, power_mapped
from ops.sim.workload import CLASSES, read_trace, resampled, synthetic, with_shares
from shared.contracts.qos import Importance

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:05.0000000,3180,8
2023-11-16 18:17:03.5000000,4808,10
2023-11-16 18:17:13.5000000,110,0
"""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_poisson_arrivals_have_the_rate_and_are_in_order() -> None:
    times = poisson(rng(), rate_rps=5, duration_s=2000)

    assert times == sorted(times)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert 0 <= times[0] < times[-1] < 2000


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_gaps_have_the_coefficient_of_variation(variation: float) -> None:
    gaps = np.diff(gamma(rng(), rate_rps=5, duration_s=4000, variation=variation))

    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)


def test_a_square_wave_begins_low() -> None:
    times = np.array(square_wave(rng(), low_rps=2, high_rps=6, half_period_s=500, duration_s=2000))
    counts = np.histogram(times, bins=[0, 500, 1000, 1500, 2000])[0]

    assert counts == pytest.approx([1000, 3000, 1000, 3000], rel=0.1)


@pytest.mark.parametrize("name", TARGETS)
def test_lengths_have_the_papers_percentiles(name: str) -> None:
    prompts, outputs = (
        model.draw(rng(), 50_000) for model in (MIXES[name].prompt, MIXES[name].output)
    )
    drawn = (*np.quantile(prompts, [0.5, 0.9]), *np.quantile(outputs, [0.5, 0.9]))

    assert drawn == pytest.approx(TARGETS[name], rel=0.05)


@given(
    values=st.lists(st.integers(1, 10_000), min_size=20, max_size=50, unique=True),
    targets=st.tuples(st.integers(10, 1000), st.integers(1001, 9000)),
)
def test_a_power_map_keeps_order_and_hits_the_percentiles(
    values: list[int], targets: tuple[int, int]
) -> None:
    mapped = power_mapped(sorted(values), *targets)

    assert mapped == sorted(mapped)
    assert min(mapped) >= 1


def test_equal_lengths_cannot_be_mapped() -> None:
    with pytest.raises(ValueError, match="90th percentile"):
        power_mapped([5, 5, 5], 10, 20)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    trace = read_trace(file)

    assert trace.arrived_at == pytest.approx((0.0, 1.5, 10.0))
    assert trace.prompts == (4808, 3180, 110)
    assert trace.outputs == (10, 8, 1)


def test_a_file_of_another_form_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")

    with pytest.raises(ValueError, match="ContextTokens"):
        read_trace(file)


def test_resampling_keeps_pairs_of_lengths(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    arrivals = resampled(rng(), read_trace(file), arrived_at=[float(n) for n in range(50)])

    assert {(a.prompt_tokens, a.output_tokens) for a in arrivals} == {
        (4808, 10),
        (3180, 8),
        (110, 1),
    }


def test_classes_and_importance_have_their_shares() -> None:
    arrivals = synthetic(
        rng(),
        arrived_at=[float(n) for n in range(20_000)],
        lengths=MIXES["code"],
        classes=with_shares((0.7, 0.15, 0.15)),
        low_share=0.2,
    )
    shares = [sum(a.class_name == c.name for a in arrivals) / 20_000 for c in CLASSES]
    low = sum(a.importance is Importance.LOW for a in arrivals) / 20_000

    assert [*shares, low] == pytest.approx([0.7, 0.15, 0.15, 0.2], abs=0.01)


def test_equal_seeds_give_equal_workloads() -> None:
    first, second, other = (
        synthetic(
            rng(seed),
            arrived_at=poisson(rng(seed), rate_rps=5, duration_s=20),
            lengths=MIXES["sharegpt"],
        )
        for seed in (1, 1, 2)
    )

    assert first == second
    assert first != other


def test_lengths_have_the_requested_mean() -> None:
    shares, tokens = (0.0, 0.5, 1.0), (10.0, 20.0, 110.0)
    drawn = LengthModel(shares=shares, tokens=tokens, mean=35.0).draw(rng(1), 200_000)

    assert np.mean(drawn) == pytest.approx(35, rel=0.01)
    assert np.quantile(drawn, 0.5) == pytest.approx(20, abs=1)


def test_a_mean_outside_the_quantiles_is_rejected() -> None:
    lengths = LengthModel(shares=(0.0, 0.5, 1.0), tokens=(10.0, 20.0, 110.0), mean=5.0)

    with pytest.raises(ValueError, match="not between 15"):
        lengths.draw(rng(1), 1)
