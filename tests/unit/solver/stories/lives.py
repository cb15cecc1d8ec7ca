"""Records of requests whose times a test chooses, in seconds after their arrival."""

from typing import Any

from shared.contracts.base import InstanceId, RequestId, TenantId
from shared.contracts.qos import Slo
from shared.contracts.requests import HistoryEntry
from shared.contracts.stories.story import Story
from tests.clocks import NOW

A0, A1 = InstanceId("a0"), InstanceId("a1")
FIRST = Slo(ttft_s=1.0)
_TIMES = ("grouped_at", "pulled_at", "submitted_at", "first_token_at", "finished_at")


def a_story(
    *times: float, slo: Slo = FIRST, history: tuple[HistoryEntry, ...] = (), **fields: Any
) -> Story:
    """
    The record of a request that arrived at `NOW` and was late.

    Args:
        times: Times of grouping, pull, begin of the last run, first token and end, after `NOW`.
        slo: Targets.
        history: Steps, with times after `NOW` as `a_step` makes them.
        fields: Other fields of `Story`.
    """
    known = {name: NOW + after for name, after in zip(_TIMES, times, strict=True)}
    values: dict[str, Any] = {
        "request_id": RequestId("r"),
        "tenant": TenantId("acme"),
        "model": "tiny",
        "instance_id": A1,
        "prompt_tokens": 40,
        "output_tokens": 11,
    }
    return Story(arrived_at=NOW, slo=slo, history=history, **(values | known | fields))


def a_step(
    what: str,
    after: float,
    *,
    pulled: float | None = None,
    begun: float | None = None,
    instance_id: InstanceId = A0,
    why: str = "",
) -> HistoryEntry:
    """A step of the history; times are seconds after `NOW`."""
    return HistoryEntry(
        at=NOW + after,
        instance_id=instance_id,
        what=what,
        why=why,
        pulled_at=None if pulled is None else NOW + pulled,
        begun_at=None if begun is None else NOW + begun,
    )
