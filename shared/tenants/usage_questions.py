"""Questions about usage, over the control exchange."""

import re
from collections.abc import Callable
from datetime import UTC, datetime

from shared.broker import topology
from shared.broker.protocol import Broker
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, Seconds, UnixTime
from shared.contracts.errors import ContractError
from shared.contracts.tenants.usage import UsageReported, UsageRequested

TIMEOUT_S: Seconds = 5.0
BY = ("tenant", "hour", "model", "class")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_decode: Decoder[UsageReported] = Decoder(UsageReported)


async def ask_usage(
    broker: Broker, question: Callable[[str], UsageRequested]
) -> UsageReported | None:
    """The answer of the process that counts usage; None if there is none."""
    answer = await ask(broker, topology.CONTROL_USAGE, question, _decode, timeout_s=TIMEOUT_S)
    return answer if isinstance(answer, UsageReported) else None


def parse_duration(text: str, *, param: str) -> Seconds:
    """
    A duration: a number with s, m, h or d.

    Raises:
        ContractError: It is something else.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ContractError(
            f"{param} is {text[:40]!r}; it must be a number with s, m, h or d, e.g. 24h",
            param=param,
        )
    return float(found[1]) * UNITS[found[2]]


def parse_time(text: str, now: UnixTime, *, param: str) -> UnixTime:
    """
    A time: Unix seconds, an ISO date or time (UTC if it names no zone), or a duration before *now*.

    Raises:
        ContractError: It is none of them.
    """
    if _DURATION.fullmatch(text):
        return now - parse_duration(text, param=param)
    try:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text)
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ContractError(
            f"{param} is {text[:40]!r}; it must be Unix seconds, a date such as 2026-01-31, or a "
            "duration such as 24h",
            param=param,
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
