"""SLO attainment of recent requests by class and tenant."""

from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from shared.contracts.base import Seconds, TenantId, UnixTime
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import RequestObserved

WINDOW_S: Seconds = 300.0
"""Age up to which requests count."""
MOST_REQUESTS = 20_000
"""Number of requests that are kept; of more, only the newest count."""
MOST_ROWS = 60
"""Number of rows; further tenants are left out, those with the fewest requests first."""


class AttainmentRow(msgspec.Struct, frozen=True, kw_only=True):
    """Recent requests of one class and tenant."""

    qos_class: QosClass
    tenant: TenantId
    requests: int
    attained: float
    """Share of the requests that met all of their targets."""
    failed: int
    first_token_s: tuple[Seconds, Seconds] | None
    """Median and 95th percentile of the time from arrival to the first token; None without one."""
    whole_s: tuple[Seconds, Seconds] | None
    """The same for the time to the last token."""


@dataclass(slots=True)
class Attainment:
    """Requests that have ended in the last five minutes."""

    _recent: deque[RequestObserved] = field(default_factory=lambda: deque(maxlen=MOST_REQUESTS))

    def add(self, observed: RequestObserved) -> None:
        """Count a request that has ended."""
        self._recent.append(observed)

    def clear(self) -> None:
        """Forget all requests."""
        self._recent.clear()

    def rows(self, now: UnixTime) -> tuple[AttainmentRow, ...]:
        """One row per class and tenant, those with the most requests first."""
        while self._recent and self._recent[0].finished_at < now - WINDOW_S:
            self._recent.popleft()
        groups: dict[tuple[QosClass, TenantId], list[RequestObserved]] = defaultdict(list)
        for each in self._recent:
            groups[each.qos_class, each.tenant].append(each)
        rows = (_row(*key, group) for key, group in groups.items())
        return tuple(sorted(rows, key=lambda row: (-row.requests, row.tenant)))[:MOST_ROWS]


def _row(qos_class: QosClass, tenant: TenantId, group: list[RequestObserved]) -> AttainmentRow:
    ended = [each for each in group if each.outcome == "completed"]
    return AttainmentRow(
        qos_class=qos_class,
        tenant=tenant,
        requests=len(group),
        attained=sum(each.attained for each in group) / len(group),
        failed=len(group) - len(ended),
        first_token_s=_spread([e.first_token_at - e.arrived_at for e in ended if e.first_token_at]),
        whole_s=_spread([each.finished_at - each.arrived_at for each in ended]),
    )


def _spread(times_s: list[Seconds]) -> tuple[Seconds, Seconds] | None:
    if not times_s:
        return None
    median_s, most_s = np.quantile(times_s, (0.5, 0.95))
    return float(median_s), float(most_s)
