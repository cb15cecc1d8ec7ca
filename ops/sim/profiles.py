"""Latency profiles as data: profiles in the repository, and fitted profiles."""

from codecs import BOM_UTF8
from pathlib import Path

import msgspec

from shared.contracts.base import Seconds
from shared.contracts.estimates import Profile
from solver.scheduling.engine.latency import LatencyTable

DIRECTORY = Path(__file__).parent / "profiles"
MAX_TOKENS = 8192
ALIASES = {
    "28": "a100-llama3-8b-28",
    "2x": "a100-llama3-8b-2x",
    "raw": "a100-llama3-8b-raw",
    "h100": "h100-llama3-8b",
}


class ProfileData(msgspec.Struct, frozen=True, kw_only=True):
    """Latency profile of one device and model."""

    name: str
    model: str
    device: str
    tokens: tuple[int, ...]
    microseconds: tuple[int, ...]
    """Time of an iteration without attention and overhead, by number of tokens."""
    overhead_s: Seconds
    pair_s: Seconds
    context_s: Seconds
    kv_capacity_tokens: int


class NamedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A latency profile that the simulator can use."""

    name: str
    latency: LatencyTable
    kv_capacity_tokens: int


def load(name: str, *, kv_capacity_tokens: int = 400_000) -> NamedProfile:
    """
    Load a profile by name, alias or file.

    Args:
        name: One of `names()`, a file in the format of the shipped profiles, or a file with a
            published `shared.contracts.estimates.Profile`.
        kv_capacity_tokens: Capacity of an engine if the profile does not state it.

    Raises:
        ValueError: There is no such profile, or it has no latency model.
    """
    file = DIRECTORY / f"{ALIASES.get(name, name)}.json"
    if not file.exists():
        file = Path(name)
    if not file.is_file():
        raise ValueError(f"no profile {name!r}; known: {', '.join(names())}, or a file")
    content = file.read_bytes().removeprefix(BOM_UTF8)
    try:
        return _measured(msgspec.json.decode(content, type=ProfileData))
    except msgspec.ValidationError:
        fitted = msgspec.json.decode(content, type=Profile)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if fitted.latency is None:
        raise ValueError(f"{file}: the profile has no latency model yet")
    return NamedProfile(
        name=f"{fitted.model}/{fitted.device}",
        latency=LatencyTable.from_coefficients(fitted.latency, max_tokens=MAX_TOKENS),
        kv_capacity_tokens=fitted.kv_capacity_tokens or kv_capacity_tokens,
    )


def names() -> list[str]:
    """Names of the profiles in the repository."""
    return sorted(file.stem for file in DIRECTORY.glob("*.json"))


def _measured(data: ProfileData) -> NamedProfile:
    points = {
        tokens: 1e-6 * time for tokens, time in zip(data.tokens, data.microseconds, strict=True)
    }
    return NamedProfile(
        name=data.name,
        latency=LatencyTable.from_points(
            points,
            max_tokens=MAX_TOKENS,
            overhead_s=data.overhead_s,
            pair_s=data.pair_s,
            context_s=data.context_s,
        ),
        kv_capacity_tokens=data.kv_capacity_tokens,
    )
