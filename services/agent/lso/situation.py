"""The agent's situation: the input from which `solver.planning.lso.actions` selects operations."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from services.agent.backends.base import Capability, EngineBackend, EngineSnapshot
from services.agent.backends.weights import weight_bytes
from services.agent.holding import pull_state
from services.agent.lso.sizes import kv_bytes_per_token
from services.agent.settings import LsoSettings
from services.agent.state import AgentState, Run
from shared.contracts.base import ModelName, Seconds
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import Residency
from shared.runtime.clock import Clock
from solver.planning.lso.evict_or_swap import KvCosts
from solver.planning.lso.situation import Demand, RunningWork, Situation, SwappedWork, WarmSet
from solver.prediction.latency.service_time import predicted_prefill_s, predicted_rest_s
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import rank_of
from solver.scheduling.pull_room import PullBounds
from solver.scheduling.window import tokens_needed

NO_BOUND = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of models in bytes; 0 if unknown."""

    weights: dict[ModelName, int] = field(default_factory=dict)
    kv_per_token: dict[ModelName, int] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[ModelEntry]) -> "ModelSizes":
        """The sizes of *entries*."""
        sizes = cls()
        for entry in entries:
            sizes.add(entry)
        return sizes

    def add(self, entry: ModelEntry) -> None:
        """Read the sizes of a model from the registry and the model's files."""
        self.weights[entry.name] = weight_bytes(entry)
        self.kv_per_token[entry.name] = kv_bytes_per_token(entry)


class Observer:
    """
    Provides the situation of the instance.

    Args:
        sizes: Sizes of all models.
        settings: Priors and budgets.
        bounds: Bounds of pulled work.
        drain_limit_s: Longest drain before a model swap.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        engine: EngineBackend,
        sizes: ModelSizes,
        settings: LsoSettings,
        bounds: PullBounds,
        drain_limit_s: Seconds,
        clock: Clock,
    ) -> None:
        self._state = state
        self._engine = engine
        self.sizes = sizes
        self._settings = settings
        self._bounds = bounds
        self._drain_limit_s = drain_limit_s
        self._clock = clock

    def situation(self, demand: Demand | None = None) -> Situation:
        """
        Current situation of the instance; requests that are about to leave do not count.

        Args:
            demand: Tokens and slots that the request at the head needs; None: the needs of all
                regular requests in the window.
        """
        state, snapshot = self._state, self._engine.snapshot()
        pull = pull_state(state, snapshot, self._bounds)
        staying = [run for run in state.runs.values() if run.ending is None]
        held_tokens = sum(run.tokens_needed for run in staying)
        return Situation(
            active=state.model,
            costs=self.costs(snapshot),
            running=tuple(self._work(run) for run in staying),
            swapped=tuple(
                SwappedWork(
                    request_id=swapped.pulled.request.request_id,
                    needed_tokens=tokens_needed(swapped.pulled.request),
                    rested=swapped.pulled.request.request_id in state.window,
                )
                for swapped in state.swapped_out.values()
            ),
            demand=self._window_demand() if demand is None else demand,
            # An engine that has not yet reported its KV capacity counts as unbounded.
            free_tokens=(snapshot.kv_capacity_tokens or NO_BOUND) - held_tokens,
            free_slots=snapshot.max_running - len(staying),
            host_kv_free_bytes=self.host_kv_free_bytes(snapshot),
            warm_set=self._warm_set(snapshot),
            activate_s={entry.model: entry.activate_s for entry in snapshot.models},
            drain_limit_s=self._drain_limit_s,
            return_s=self._return_s(snapshot),
            pull_room=pull.max_requests - pull.requests if pull.room else 0,
        )

    def costs(self, snapshot: EngineSnapshot) -> KvCosts:
        """KV costs of the active model on this instance, measured where possible."""
        profile, copied = self._state.profile, snapshot.checkpoints
        measured = copied.restored_bytes / copied.restore_s if copied.restore_s > 0 else 0.0
        return KvCosts(
            latency=None if profile is None else profile.latency,
            bytes_per_token=self.kv_bytes(1),
            transfer_bytes_per_s=measured or self._settings.transfer_bytes_per_s,
            host_checkpoints=Capability.CHECKPOINT in self._engine.identity.capabilities,
        )

    def kv_bytes(self, tokens: int) -> int:
        """KV size in bytes of *tokens* tokens of the active model; 0 if unknown."""
        if self._state.model is None:
            return 0
        return tokens * self.sizes.kv_per_token.get(self._state.model, 0)

    def host_kv_free_bytes(self, snapshot: EngineSnapshot) -> int:
        """Host memory for KV, without the part that is reserved for swapped-out requests."""
        kept = sum(swapped.context_tokens for swapped in self._state.swapped_out.values())
        return max(0, snapshot.host_kv_capacity_bytes - self.kv_bytes(kept))

    def _return_s(self, snapshot: EngineSnapshot) -> Seconds:
        """
        Predicted time to swap back to the current model: a drain and an activation.

        The active model's own activation time is unknown, so the mean time of the other models is
        used.
        """
        others_s = [
            entry.activate_s for entry in snapshot.models if entry.residency is not Residency.ACTIVE
        ]
        return self._drain_limit_s + (fmean(others_s) if others_s else 0.0)

    def _work(self, run: Run) -> RunningWork:
        request, remaining_s = run.request, self._remaining_s(run)
        return RunningWork(
            request_id=request.request_id,
            lane=request.lane,
            context_tokens=request.prompt_tokens + run.answer.num_tokens,
            held_tokens=run.tokens_needed,
            gives_way=rank_of(request) is not Rank.REGULAR,
            remaining_s=remaining_s,
            slack_s=self._slack_s(run, remaining_s),
        )

    def _slack_s(self, run: Run, remaining_s: Seconds | None) -> Seconds:
        """
        Time for which a run can pause without missing the deadline of its next token or completion.
        """
        request, now = run.request, self._clock.now()
        if remaining_s is None or rank_of(request) is not Rank.REGULAR:
            return math.inf
        slo, arrived_at = request.slo, request.arrived_at
        next_due_at = slo.token_deadline_at(arrived_at, run.answer.num_tokens + 1)
        return min(next_due_at, slo.completion_deadline_at(arrived_at) - remaining_s) - now

    def _remaining_s(self, run: Run) -> Seconds | None:
        profile = self._state.profile
        if profile is None or profile.latency is None:
            return None
        left_s = predicted_rest_s(run.request, profile, output_tokens=run.answer.num_tokens)
        return left_s if run.answer.begun else left_s + predicted_prefill_s(run.request, profile)

    def _window_demand(self) -> Demand:
        waiting = [request for request in self._state.window if rank_of(request) is Rank.REGULAR]
        return Demand(tokens=sum(map(tokens_needed, waiting)), slots=len(waiting))

    def _warm_set(self, snapshot: EngineSnapshot) -> WarmSet:
        can_warm = Capability.WARM_START in self._engine.identity.capabilities
        return WarmSet(
            residency={entry.model: entry.residency for entry in snapshot.models},
            num_bytes={entry.model: entry.warm_bytes for entry in snapshot.models},
            budget_bytes=snapshot.warm_capacity_bytes if can_warm else 0,
        )
