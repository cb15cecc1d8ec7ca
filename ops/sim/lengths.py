"""Distributions of prompt and answer lengths, from percentiles or from a trace."""

import math
from dataclasses import dataclass

import numpy as np

_MEDIAN_SHARE, _HIGH_SHARE = 0.5, 0.9
_HIGH_Z = 1.2815515655446004
"""Quantile of the standard normal distribution at the level `_HIGH_SHARE`."""

# fmt: off
_CODE_SHARES = (
    0, .01, .05, .1, .15, .2, .25, .3, .35, .4, .45, .5, .55, .6, .65, .7, .75, .8, .85, .9, .925,
    .95, .96, .97, .98, .985, .99, .9925, .995, .9965, .998, .999, .9995, 1,
)
_CODE_PROMPTS = (
    6, 30, 121, 226, 346, 555, 810, 1057, 1272, 1443, 1674, 1930, 2199, 2463, 2768, 3088, 3454,
    3977, 4816, 6251, 7266, 8596, 8735, 8741, 8742, 8742, 8742, 8742, 8742, 8742, 8742, 8743,
    8743, 8743,
)
_CODE_OUTPUTS = (
    3, 3, 3, 4, 4, 5, 5, 5, 6, 7, 7, 8, 9, 10, 12, 13, 16, 20, 29, 43, 56, 76, 91, 115, 161, 195,
    253, 295, 384, 479, 793, 1012, 1098, 2672,
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """
    Draws lengths in tokens by given quantiles.

    Args:
        shares: Shares of the distribution, rising from 0 to 1.
        tokens: Length at each of *shares*.
        mean: Mean of all lengths, which determines how lengths between two neighbouring quantiles
            shift towards the lower quantile. None: they are uniform between the quantiles.
    """

    shares: tuple[float, ...]
    tokens: tuple[float, ...]
    mean: float | None = None

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """Draw *count* lengths; each length is at least 1 token."""
        shares, tokens = np.array(self.shares), np.array(self.tokens)
        drawn = random.random(count)
        low = np.searchsorted(shares, drawn, side="right") - 1
        width, rise = np.diff(shares)[low], np.diff(tokens)[low]
        values = tokens[low] + rise * ((drawn - shares[low]) / width) ** self._bend()
        return [max(1, round(value)) for value in values]

    def _bend(self) -> float:
        """
        Exponent of the curve between two quantiles with which the mean of the lengths is the given
        mean.
        """
        if self.mean is None:
            return 1.0
        widths = np.diff(self.shares)
        lowest = float(widths @ np.array(self.tokens[:-1]))
        highest = float(widths @ np.array(self.tokens[1:]))
        if not lowest < self.mean < highest:
            raise ValueError(f"the mean {self.mean} is not between {lowest} and {highest}")
        # The mean of v ** bend over 0..1 is 1 / (bend + 1).
        return (highest - lowest) / (self.mean - lowest) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMix:
    """
    Lengths of prompts and answers, drawn independently.

    In the public code trace, the rank correlation of prompt and answer lengths is -0.02.
    """

    name: str
    prompt: LengthModel
    output: LengthModel

    def draw(self, random: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Draw the prompt and answer lengths of *count* requests."""
        return self.prompt.draw(random, count), self.output.draw(random, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTraffic:
    """Several mixes of lengths at the same time, each with an equal share of the requests."""

    name: str
    parts: tuple[LengthMix, ...]

    def draw(self, random: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Draw the prompt and answer lengths of *count* requests."""
        drawn = [part.draw(random, count) for part in self.parts]
        chosen = random.integers(len(self.parts), size=count)
        prompts = [drawn[part][0][number] for number, part in enumerate(chosen)]
        outputs = [drawn[part][1][number] for number, part in enumerate(chosen)]
        return prompts, outputs


def lognormal(p50: float, p90: float, *, largest: float) -> LengthModel:
    """
    Draw lognormal lengths with median *p50* and 90th percentile *p90*, cut at *largest* tokens.
    """
    sigma = math.log(p90 / p50) / _HIGH_Z
    z = np.linspace(-4, 4, 161)
    shares = [0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z]
    tokens = [min(largest, p50 * math.exp(sigma * v)) for v in z]
    return LengthModel(shares=(0.0, *shares[1:-1], 1.0), tokens=tuple(tokens))


def power_mapped(values: list[int], p50: float, p90: float) -> list[int]:
    """Map *values* by `a·x^b` so that their median is *p50* and their 90th percentile *p90*."""
    median, high = np.quantile(values, [_MEDIAN_SHARE, _HIGH_SHARE])
    if median <= 0 or high <= median:
        raise ValueError("the 90th percentile of the lengths must be above their median")
    power = math.log(p90 / p50) / math.log(high / median)
    return [max(1, round(p50 * (max(value, 0.5) / median) ** power)) for value in values]


def _table2(name: str, prompt: tuple[float, float], output: tuple[float, float]) -> LengthMix:
    return LengthMix(
        name=name,
        prompt=lognormal(*prompt, largest=16384),
        output=lognormal(*output, largest=4096),
    )


CODE = LengthMix(
    name="code",
    prompt=LengthModel(shares=_CODE_SHARES, tokens=_CODE_PROMPTS, mean=2550),
    output=LengthModel(shares=_CODE_SHARES, tokens=_CODE_OUTPUTS, mean=22),
)
_PAPERS: dict[str, LengthMix] = {
    "code": CODE,
    "conversation": _table2("conversation", (928, 3830), (41, 342)),
    "sharegpt": _table2("sharegpt", (1730, 5696), (415, 834)),
    "long": LengthMix(
        name="long",
        prompt=LengthModel(shares=(0.0, 1.0), tokens=(10_000, 10_000)),
        output=LengthModel(shares=(0.0, 1.0), tokens=(500, 500)),
    ),
}
"""
Mixes with the p50 and p90 of QoServe's table 2.

`code` has quantiles and mean of the public Azure LLM inference trace of 2023 (code), mapped by a
power law to the table's percentiles. `conversation` and `sharegpt` are lognormal. `long` is the
synthetic trace of §4.5.1.
"""
MIXES: dict[str, LengthMix | MixedTraffic] = {
    **_PAPERS,
    "mixture": MixedTraffic(name="mixture", parts=tuple(_PAPERS.values())),
}
"""QoServe's mixes by name; `mixture` has equal shares of all four."""

TARGETS: dict[str, tuple[float, float, float, float]] = {
    "code": (1930, 6251, 8, 43),
    "conversation": (928, 3830, 41, 342),
    "sharegpt": (1730, 5696, 415, 834),
}
"""Name of a mix -> prompt p50, prompt p90, answer p50, answer p90, in tokens."""
