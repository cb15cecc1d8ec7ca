"""What a plan is made from: request groups and instances, as values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.lanes import LaneKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A request group: the waiting members of one lane and its companions (QLM Def. 4.1)."""

    key: LaneKey
    waiting: int
    deadline_at: UnixTime
    """Earliest deadline among them, as far as known; infinite for best effort."""
    tokens_per_request: float = 256.0
    """Mean predicted prefill + decode tokens."""

    @property
    def best_effort(self) -> bool:
        return math.isinf(self.deadline_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance: what it has, what it could have, how fast it is."""

    instance_id: InstanceId
    active: ModelName | None
    activate_s: Mapping[ModelName, Seconds]
    """Models that it can serve and what activating each costs now; 0 when active."""
    token_rate_per_s: Mapping[ModelName, float] = field(default_factory=dict)
    backlog_s: Seconds = 0.0
    """Work it has already pulled."""

    def rate(self, model: ModelName, default: float = 500.0) -> float:
        """Tokens per second, or a prior for what was never measured."""
        return self.token_rate_per_s.get(model, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """The world at *now*."""

    now: UnixTime
    groups: tuple[GroupView, ...]
    instances: tuple[InstanceView, ...]
    express: frozenset[ModelName] = frozenset()
    """Models with interactive arrivals; each keeps at least one instance that has it active."""
