"""Usage of tenants in memory: rows by hour, and the ids of requests that count already."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from shared.contracts.base import ModelName, TenantId, UnixTime
from shared.contracts.tenants.usage import HOUR_S, RequestMetered, UsageRequested, UsageRow

MAX_REMEMBERED = 1_000_000
"""Number of requests whose ids are remembered, so that none counts twice."""
DAY_S = 86_400
NUM_DAYS = 3
"""Number of days whose sums are kept."""
Key = tuple[TenantId, int, ModelName, str]
"""Tenant, begin of the hour, model and class."""


@dataclass(slots=True)
class UsageBook:
    """What finals have counted, by tenant, hour, model and class."""

    rows: dict[Key, UsageRow] = field(default_factory=dict)
    counts_since: UnixTime = 0.0
    _seen: "OrderedDict[str, None]" = field(default_factory=OrderedDict)
    _days: dict[int, dict[TenantId, int]] = field(default_factory=dict)
    """Day -> tokens of each tenant, for the last days."""

    def has(self, metered: RequestMetered) -> bool:
        """Return whether the request counts already."""
        return _identity(metered) in self._seen

    def add(self, metered: RequestMetered) -> bool:
        """Count a final; return False if its request counts already."""
        key = _identity(metered)
        if key in self._seen:
            return False
        self._seen[key] = None
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)
        self.put(row_of(metered))
        if not self.counts_since or metered.finished_at < self.counts_since:
            self.counts_since = metered.finished_at
        return True

    def put(self, row: UsageRow) -> None:
        """Add a row to the row of the same tenant, hour, model and class."""
        key = (row.tenant, row.hour, row.model, row.qos_class)
        known = self.rows.get(key)
        self.rows[key] = row if known is None else _sum(known, row)
        day = self._days.setdefault(row.hour // DAY_S, {})
        day[row.tenant] = day.get(row.tenant, 0) + row.total_tokens
        while len(self._days) > NUM_DAYS:
            del self._days[min(self._days)]

    def forget_before(self, hour: int) -> None:
        """Drop the rows of hours that begin before *hour*, the begin of an hour."""
        self.rows = {key: row for key, row in self.rows.items() if row.hour >= hour}
        if self.counts_since:
            self.counts_since = max(self.counts_since, hour)

    def used_on(self, day: int) -> dict[TenantId, int]:
        """Tokens of prompts and answers on one of the last days (UTC), by tenant."""
        return dict(self._days.get(day, {}))

    def answer(self, asked: UsageRequested) -> tuple[UsageRow, ...]:
        """The rows that a question asks for, in order."""
        first = asked.since // HOUR_S * HOUR_S
        chosen = (
            row
            for row in self.rows.values()
            if (asked.tenant is None or row.tenant == asked.tenant)
            and row.hour >= first
            and (asked.until is None or row.hour < asked.until)
        )
        return summed(chosen, asked.by)


def summed(rows: Iterable[UsageRow], by: tuple[str, ...]) -> tuple[UsageRow, ...]:
    """*rows* summed over all fields that *by* does not name, in order."""
    found: dict[Key, UsageRow] = {}
    for row in rows:
        kept = msgspec.structs.replace(
            row,
            tenant=row.tenant if "tenant" in by else TenantId(""),
            hour=row.hour if "hour" in by else 0,
            model=row.model if "model" in by else ModelName(""),
            qos_class=row.qos_class if "class" in by else "",
        )
        key = (kept.tenant, kept.hour, kept.model, kept.qos_class)
        known = found.get(key)
        found[key] = kept if known is None else _sum(known, kept)
    return tuple(found[key] for key in sorted(found))


def row_of(metered: RequestMetered) -> UsageRow:
    """What one final counts."""
    return UsageRow(
        tenant=metered.tenant,
        hour=int(metered.finished_at // HOUR_S) * HOUR_S,
        model=metered.model,
        qos_class=metered.qos_class.value,
        requests={metered.outcome: 1},
        prompt_tokens=metered.prompt_tokens,
        completion_tokens=metered.completion_tokens,
        cached_tokens=metered.cached_tokens,
    )


def _sum(known: UsageRow, row: UsageRow) -> UsageRow:
    requests = dict(known.requests)
    for outcome, number in row.requests.items():
        requests[outcome] = requests.get(outcome, 0) + number
    return msgspec.structs.replace(
        known,
        requests=requests,
        prompt_tokens=known.prompt_tokens + row.prompt_tokens,
        completion_tokens=known.completion_tokens + row.completion_tokens,
        cached_tokens=known.cached_tokens + row.cached_tokens,
    )


def _identity(metered: RequestMetered) -> str:
    # Ids are unique only within one tenant.
    return f"{metered.tenant}\0{metered.request_id}"
