"""Traffic of chat, retrieval and shared templates by several tenants (QUARTZ §5.2)."""

from dataclasses import dataclass, field

import numpy as np

from ops.sim.arrivals import poisson, varying
from ops.sim.lengths import LengthModel, lognormal
from ops.sim.request import Arrival
from shared.contracts.base import Seconds, TenantId
from shared.contracts.qos import Slo

INTERACTIVE = Slo(ttft_s=2.0, tbt_s=0.2)
LONG = Slo(ttft_s=4.0, tbt_s=0.2)
MAX_PROMPT_TOKENS = 16_384
_MAX_CONTEXT_TOKENS = 8192
_SYSTEM_TOKENS = 256
"""Tokens of the system prompt, which all chat and retrieval requests of a tenant share."""
_REST_S = 8.0
"""Minimum time between two turns of a conversation."""
_BURST_S, _PERIOD_S = 10.0, 60.0
_BURST, _CALM = 1.75, 0.85
"""Factors of the rate in and between bursts; the mean rate does not change."""

_MESSAGE = lognormal(90, 400, largest=2000)
_ANSWER = lognormal(130, 400, largest=2000)
_PASSAGES = lognormal(4000, 8000, largest=14_000)
_SHORT_ANSWER = lognormal(90, 250, largest=1000)
_FIELDS = lognormal(120, 300, largest=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Kinds of requests and their shares in a workload."""

    rag: float = 0.3
    """Share of retrieval-augmented requests."""
    structured: float = 0.0
    """Share of requests that fill in one of a few long templates."""
    follow_up: float = 0.75
    """Probability that a chat request continues an open conversation."""
    reuse: float = 1.0
    """Probability that a request uses an existing shared prefix instead of a new prefix."""
    budget: float = 1.0
    """Factor of the answer lengths and of `max_tokens`."""
    bursty: bool = False


MIXES: dict[str, Mix] = {
    "mixed": Mix(),
    "chat": Mix(rag=0.0),
    "rag": Mix(rag=1.0),
    "structured": Mix(rag=0.1, structured=0.6),
    "bursty": Mix(bursty=True),
    "more-rag": Mix(rag=0.6),
    "low-reuse": Mix(reuse=0.1),
    "large-budget": Mix(budget=2.0),
}
"""
`more-rag`, `low-reuse` and `large-budget` are the paper's three shifts of `mixed`.

Decided: the paper does not quantify the shifts. Here the retrieval share doubles, reuse falls to a
tenth, and answers double.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedArrival:
    """One request of the trace of arrivals."""

    arrival: Arrival
    tenant: TenantId
    max_tokens: int
    prefixes: tuple[tuple[str, int], ...]
    """Key and tokens of each prefix that the request shares with others, longest first."""
    stores: str
    """Key under which the context of this request is cached for later requests."""


@dataclass(slots=True)
class _Conversation:
    key: str
    tenant: TenantId
    context_tokens: int
    rests_until: float


@dataclass(slots=True, kw_only=True)
class RoutedTraffic:
    """
    Traffic of several tenants in an open loop: requests arrive without waiting for earlier answers.

    Args:
        rate_rps: Mean rate over the trace.
        num_requests: Number of requests of the trace.
        tenants: Each tenant's share of the requests.
        size: Factor of all lengths.
    """

    mix: Mix
    rate_rps: float
    num_requests: int
    seed: int
    tenants: tuple[float, ...] = (0.2, 0.2, 0.2, 0.2, 0.2)
    size: float = 1.0
    """
    Factor of all lengths; below 1 for engines that run in real time on small machines.
    """
    _open: list[_Conversation] = field(default_factory=list)
    _num_keys: int = 0

    def arrivals(self) -> list[RoutedArrival]:
        """Arrivals in order of time; equal parameters give equal arrivals."""
        random = np.random.default_rng(self.seed)
        self._open, self._num_keys = [], 0
        return [self._one(at, random) for at in self._times(random)]

    def _times(self, random: np.random.Generator) -> list[float]:
        duration_s: Seconds = 1.2 * self.num_requests / self.rate_rps + _PERIOD_S
        if self.mix.bursty:
            times = varying(
                random,
                rate_at=lambda at: self.rate_rps * _burst_factor(at),
                peak_rps=self.rate_rps * _BURST,
                duration_s=duration_s,
            )
        else:
            times = poisson(random, rate_rps=self.rate_rps, duration_s=duration_s)
        return times[: self.num_requests]

    def _one(self, at: float, random: np.random.Generator) -> RoutedArrival:
        kind = float(random.random())
        if kind < self.mix.rag:
            return self._retrieval(at, random)
        if kind < self.mix.rag + self.mix.structured:
            return self._template(at, random)
        return self._chat(at, random)

    def _chat(self, at: float, random: np.random.Generator) -> RoutedArrival:
        resting = [each for each in self._open if each.rests_until <= at]
        if resting and random.random() < self.mix.follow_up:
            talk = resting[int(random.integers(len(resting)))]
        else:
            talk = _Conversation(self._new_key(), self._tenant(random), self._system_tokens, 0.0)
            self._open.append(talk)
        before, message = talk.context_tokens, self._sized(_drawn(_MESSAGE, random))
        made = self._made(
            at,
            random,
            tenant=talk.tenant,
            prompt_tokens=before + message,
            answer=_ANSWER,
            slo=INTERACTIVE,
            class_name="chat",
            prefixes=((talk.key, before), (_system(talk.tenant), self._system_tokens)),
            stores=talk.key,
        )
        talk.context_tokens = before + message + made.arrival.output_tokens
        talk.rests_until = at + _REST_S + float(random.exponential(2 * _REST_S))
        if (
            talk.context_tokens > self.size * _MAX_CONTEXT_TOKENS
            or random.random() > self.mix.follow_up
        ):
            self._open.remove(talk)
        return made

    def _retrieval(self, at: float, random: np.random.Generator) -> RoutedArrival:
        tenant = self._tenant(random)
        return self._made(
            at,
            random,
            tenant=tenant,
            prompt_tokens=self._system_tokens + self._sized(_drawn(_PASSAGES, random)),
            answer=_SHORT_ANSWER,
            slo=LONG,
            class_name="rag",
            prefixes=((_system(tenant), self._system_tokens),),
            stores=self._new_key(),
        )

    def _template(self, at: float, random: np.random.Generator) -> RoutedArrival:
        number = int(random.integers(12))
        shared = self._sized(1000 + 250 * number)
        return self._made(
            at,
            random,
            tenant=self._tenant(random),
            prompt_tokens=shared + self._sized(_drawn(_FIELDS, random)),
            answer=_SHORT_ANSWER,
            slo=INTERACTIVE,
            class_name="structured",
            prefixes=((f"template {number}", shared),),
            stores=self._new_key(),
        )

    def _made(
        self,
        at: float,
        random: np.random.Generator,
        *,
        tenant: TenantId,
        prompt_tokens: int,
        answer: LengthModel,
        slo: Slo,
        class_name: str,
        prefixes: tuple[tuple[str, int], ...],
        stores: str,
    ) -> RoutedArrival:
        output_tokens = max(1, round(self.size * self.mix.budget * _drawn(answer, random)))
        limits = np.array((256, 512, 1024)) * self.mix.budget * self.size
        possible = limits[limits >= output_tokens]
        max_tokens = int(random.choice(possible)) if len(possible) else output_tokens
        return RoutedArrival(
            arrival=Arrival(
                arrived_at=at,
                prompt_tokens=min(prompt_tokens, MAX_PROMPT_TOKENS),
                output_tokens=output_tokens,
                class_name=class_name,
                slo=slo,
            ),
            tenant=tenant,
            max_tokens=max_tokens,
            prefixes=prefixes if random.random() < self.mix.reuse else (),
            stores=stores,
        )

    @property
    def _system_tokens(self) -> int:
        return self._sized(_SYSTEM_TOKENS)

    def _sized(self, tokens: int) -> int:
        return max(1, round(self.size * tokens))

    def _tenant(self, random: np.random.Generator) -> TenantId:
        number = int(random.choice(len(self.tenants), p=self.tenants))
        return TenantId(f"tenant {number}")

    def _new_key(self) -> str:
        self._num_keys += 1
        return f"context {self._num_keys}"


def _drawn(lengths: LengthModel, random: np.random.Generator) -> int:
    return lengths.draw(random, 1)[0]


def _system(tenant: TenantId) -> str:
    return f"system prompt of {tenant}"


def _burst_factor(at: float) -> float:
    return _BURST if at % _PERIOD_S >= _PERIOD_S - _BURST_S else _CALM
