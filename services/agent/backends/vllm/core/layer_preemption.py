"""
The engine core's part of preemption inside a forward pass (ConServe §4.3).

This module publishes the running iteration to the front, sends the iteration's droppable parts to
the worker, and reverts vLLM's count of computed tokens for dropped parts. The module uses private
interfaces of vLLM; the contract suite fails when these change.
"""

import time
from collections import deque
from math import inf
from pathlib import Path
from typing import Any

from services.agent.backends.vllm.core.policy_scheduler import PolicyDriven
from services.agent.backends.vllm.core.scheduler import TimedScheduler
from services.agent.backends.vllm.core.work import ScheduledWork, is_prefill, work_of
from services.agent.backends.vllm.shared.core_ids import run_of
from services.agent.backends.vllm.shared.preemptible_work import (
    DroppablePart,
    SafepointOrder,
    droppable_parts,
)
from services.agent.backends.vllm.shared.qos import qos_in_core
from services.agent.backends.vllm.shared.safepoints import (
    SafepointCore,
    demand_of,
    is_awaited,
    safepoints_path,
)
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import Iteration
from solver.scheduling.engine.decision import IterationOutcome
from solver.scheduling.engine.layer_preemption import RunningIteration

ORDER = "headway_order"
"""Attribute of vLLM's `SchedulerOutput` that holds a `SafepointOrder`."""
_NUM_ARRIVED = 256


class LayerPreemptible(PolicyDriven):
    """
    Mixin over a synchronous scheduler that drops best-effort work at safepoints.

    Dropped work is computed again; its KV blocks stay allocated.

    Differs: ConServe continues the online part at the layer of the safepoint. vLLM cannot start in
    the middle of a model, so the online part is computed again from the first layer, in the same
    iteration.
    Decided: best-effort requests older than `aging_bound_s` are not dropped, so that they complete
    chunks even under constant online traffic.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Attribute of vLLM, which is untyped.
        self._inflight_prefills: set[Any]
        if len(self.kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                "layer-wise preemption requires a model with one kind of attention; set "
                "engine.vllm.safepoint_layers to 0 to serve this model"
            )
        self._safepoints = SafepointCore(safepoints_path(Path(self.settings.stats_path)))
        self._safepoints.begin()
        self._safepoints.learn(self._learner.coefficients)
        self._number = 0
        self._parts: list[DroppablePart] = []
        """Droppable parts of the running iteration."""
        self._rest = ScheduledWork(0.0, 0, 0.0, 0, 0)
        """Work of the running iteration that remains after a preemption."""
        self._arrived: deque[int] = deque(maxlen=_NUM_ARRIVED)
        """Digests of online requests that arrived recently."""

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        qos = qos_in_core(request)
        if qos.slo.qos_class is QosClass.BEST_EFFORT:
            arrived_at = qos.arrived_at or request.arrival_time
            request.headway_droppable_until = arrived_at + self.settings.scheduling.aging_bound_s
        else:
            request.headway_droppable_until = -inf
            self._arrived.append(demand_of(run_of(request.request_id)))

    def on_output(self, output: Any, admitted: list[str]) -> None:
        super().on_output(output, admitted)
        self._parts = droppable_parts(
            output.num_scheduled_tokens,
            self.requests,
            self._blocks_from,
            admitted=frozenset(admitted),
            block_tokens=self.block_size,
            now=time.time(),
        )
        if not self._parts:
            return
        droppable = frozenset(part.request_id for part in self._parts)
        iteration = self._running_iteration(output.num_scheduled_tokens, droppable)
        self._number += 1
        self._safepoints.show(self._number, iteration)
        at_once = is_awaited(
            self._safepoints.wish(), iteration, arrived=self._arrived, now=time.monotonic()
        )
        order = SafepointOrder(self._number, droppable, at_once)
        setattr(output, ORDER, order)

    def on_iteration(self, work: ScheduledWork, iteration: Iteration) -> None:
        before = self._learner.coefficients
        super().on_iteration(work, iteration)
        if self._learner.coefficients is not before:
            self._safepoints.learn(self._learner.coefficients)

    def update_from_output(self, output: Any, computed: Any) -> Any:
        if self._parts:
            self._safepoints.hide()
            if self._parts[0].request_id not in computed.req_id_to_index:
                self._undo(output, self._safepoints.cut_at(self._number))
            self._parts = []
        return super().update_from_output(output, computed)

    def _running_iteration(
        self, num_scheduled: dict[str, int], droppable: frozenset[str]
    ) -> RunningIteration:
        """Return the newest iteration; store its work that remains without *droppable*."""
        work = self.in_flight[-1]
        kept, decodes = {}, {}
        for request_id, count in num_scheduled.items():
            if request_id not in droppable:
                kept[request_id] = count
            if not _was_prefill(self.requests[request_id], count):
                decodes[request_id] = count
        self._rest = work_of(kept, self.requests, work.begun)._replace(cut=True)
        decodes_s = 0.0
        if len(decodes) < len(num_scheduled):
            decodes_s = self._learner.predict_s(work_of(decodes, self.requests, work.begun).work())
        return RunningIteration(
            began_at=time.monotonic() - (time.perf_counter() - work.begun),
            predicted_s=self._learner.predict_s(work.work()),
            decodes_s=decodes_s,
            online_tokens=self._rest.tokens,
            offline_tokens=work.tokens - self._rest.tokens,
        )

    def _undo(self, output: Any, cut_at: float | None) -> None:
        """Revert the droppable parts of a preempted iteration, which were not computed."""
        invalid: set[int] = set()
        for part in self._parts:
            count = output.num_scheduled_tokens.pop(part.request_id)
            invalid.update(part.blocks)
            request = self.requests.get(part.request_id)
            self.prev_step_scheduled_req_ids.discard(part.request_id)
            # The request may have been aborted meanwhile.
            if request is not None:
                request.num_in_flight_tokens -= count
                if not request.is_finished():
                    self._take_back(request, part)
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        # Evict the dropped blocks: blocks enter the prefix cache when they are scheduled.
        if self.kv_cache_manager.enable_caching:
            self.kv_cache_manager.evict_blocks(invalid)
        begun = self._rest.begun
        if cut_at is not None:
            begun = time.perf_counter() - (time.monotonic() - cut_at)
        self.in_flight[0] = self._rest._replace(begun=begun)
        if self._preempted:
            # Report preempted requests before the next decision, which must see them as waiting.
            self._policy.observe(
                time.time(),
                IterationOutcome(
                    iteration=self._rest.iteration(0.0), preempted=tuple(self._preempted)
                ),
            )
            self._preempted.clear()

    def _take_back(self, request: Any, part: DroppablePart) -> None:
        if part.depends:
            # The KV of the dropped part begins with blocks of another request, which that request
            # has not completed.
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            return
        request.num_computed_tokens = part.kept_tokens
        request.is_prefill_chunk = is_prefill(request)
        if request.is_prefill_chunk:
            self._inflight_prefills.add(request)
        # vLLM must cache these blocks again after their computation; it skips the blocks that this
        # count includes.
        cached = self._manager().num_cached_block
        full = part.kept_tokens // self.block_size
        if cached.get(request.request_id, 0) > full:
            cached[request.request_id] = full

    def _blocks_from(self, request_id: str, index: int) -> list[int]:
        blocks = self._manager().req_to_blocks[request_id]
        return [block.block_id for block in blocks[index:]]

    def _manager(self) -> Any:
        """Manager of the model's only kind of attention."""
        return self.kv_cache_manager.coordinator.single_type_managers[0]


def _was_prefill(request: Any, count: int) -> bool:
    """Return whether the *count* tokens that were counted as computed last belong to a prefill."""
    return bool(request.num_computed_tokens - count < request.headway_prefill_tokens)


class PreemptibleScheduler(LayerPreemptible, TimedScheduler):
    """
    Synchronous scheduler with droppable work.

    An asynchronous scheduler has already scheduled an iteration that relies on the dropped work.
    """
