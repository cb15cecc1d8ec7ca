"""Readers of the simulator's options; the error for an invalid value states the limit."""

import math
import os
from pathlib import Path

import msgspec

from ops.sim.policies import policy_factory
from ops.sim.profiles import NamedProfile, load
from ops.sim.scenario import Wave
from ops.sim.workload import CLASSES, TrafficClass, with_shares

Silo = tuple[str, str, int]
"""Class, policy and number of replicas."""
_SILO_CHUNKS = (256, 2048, 2048)
"""Chunk size of QoServe's silos by class, in tokens; small for the class with a TBT target."""
_PICTURES = (".jpg", ".pdf", ".png", ".svg")


def silo(text: str) -> tuple[Silo, ...]:
    """Parse the number of replicas of each silo."""
    try:
        counts = [int(part) for part in text.split(":")]
    except ValueError:
        counts = []
    if len(counts) != len(CLASSES) or min(counts) < 0 or sum(counts) == 0:
        raise _refused(text, "Q1:Q2:Q3 in whole numbers from 0, at least one above 0")
    return tuple(
        (traffic.name, f"sarathi-fcfs:{chunk_tokens}", count)
        for traffic, chunk_tokens, count in zip(CLASSES, _SILO_CHUNKS, counts, strict=True)
    )


def mix(text: str) -> tuple[TrafficClass, ...]:
    """Parse the shares of the classes, which need not add up to 1."""
    shares = [_number(part) for part in text.split(":")]
    if len(shares) != len(CLASSES) or not (min(shares) >= 0 and 0 < sum(shares) < math.inf):
        raise _refused(text, "Q1:Q2:Q3 in finite numbers from 0, at least one above 0")
    return with_shares(shares)


def wave(text: str) -> Wave:
    """Parse a load that alternates between two rates."""
    match [_number(part) for part in text.split(":")]:
        case [low, high] if 0 <= low <= high and 0 < high < math.inf:
            return Wave(low_rps=low, high_rps=high)
        case [low, high, half_s] if 0 <= low <= high and 0 < high < math.inf > half_s >= 1:
            return Wave(low_rps=low, high_rps=high, half_period_s=half_s)
    limit = "finite, 0 <= LOW <= HIGH, HIGH > 0, HALF_PERIOD_S >= 1"
    raise _refused(text, f"LOW:HIGH[:HALF_PERIOD_S], {limit}")


def policy(text: str) -> str:
    """Parse the name of a policy, optionally with a number after a colon."""
    try:
        policy_factory(text)
    except OverflowError as error:
        raise ValueError(f"{text!r}: {error}") from error
    _, _, number = text.partition(":")
    if number.isdecimal() and int(number) == 0:
        raise _refused(text, "a policy with a number of at least 1 after the colon")
    return text


def policies(text: str) -> tuple[str, ...]:
    """Parse names of policies that are separated by commas."""
    return tuple(policy(name.strip()) for name in text.split(","))


def profile(text: str) -> NamedProfile:
    """Load a profile by its name or from a file."""
    try:
        return load(text)
    except (ValueError, OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{text!r}: {error}") from error


def picture(text: str) -> Path:
    """Parse the path of a picture file, and check that the file can be written."""
    file = Path(text)
    if file.suffix.lower() not in _PICTURES:
        raise _refused(text, f"a file that ends in {', '.join(_PICTURES)}")
    if not file.parent.is_dir():
        raise _refused(text, f"in a directory that exists: {str(file.parent)!r}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _refused(text, "a file that may be written")
    return file


def _number(text: str) -> float:
    """
    Parse the number in *text*; return NaN, which every check rejects, if *text* is not a number.
    """
    try:
        return float(text)
    except ValueError:
        return math.nan


def _refused(text: str, limit: str) -> ValueError:
    return ValueError(f"{text!r} is not {limit}")
