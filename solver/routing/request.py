"""Data that a router has of a request and of its possible instances."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.contracts.base import InstanceId, RequestId, Seconds, TenantId, UnixTime
from shared.contracts.qos import QosClass, Slo
from solver.prediction.prefill.features import InstanceFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """One request as it arrives at the router (QUARTZ table 2)."""

    request_id: RequestId
    tenant: TenantId
    arrived_at: UnixTime
    prompt_tokens: int
    max_tokens: int
    slo: Slo
    temperature: float = 1.0
    top_p: float = 1.0
    is_streaming: bool = True
    cached_tokens: Mapping[InstanceId, int] = field(default_factory=dict)
    """
    Longest known prefix match on each instance, 0 if missing; may change before dispatch.
    """

    @property
    def deadline_at(self) -> UnixTime:
        """Deadline of the first token if interactive; infinite for best effort."""
        return self.slo.planning_deadline_at(self.arrived_at)

    @property
    def is_interactive(self) -> bool:
        return self.slo.qos_class is QosClass.INTERACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(InstanceFeatures):
    """A router's view of an instance that may serve one request."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillEstimate:
    """Prefill time of one request on one instance, from its first chunk on."""

    quantile_s: Seconds
    """Quantile of the prefill time at the level that is used for routing."""
    mean_s: Seconds
    watched_s: Seconds
    """
    Quantile of the prefill time at the monitored level; predictions are used while its coverage is
    good.
    """


class PrefillPredictor(Protocol):
    """Estimates prefill times from data that are known when a request arrives."""

    def predict(
        self, request: RoutedRequest, candidates: Sequence[Candidate]
    ) -> Sequence[PrefillEstimate]:
        """Estimate the prefill time on each candidate, in the order of the candidates."""
        ...
