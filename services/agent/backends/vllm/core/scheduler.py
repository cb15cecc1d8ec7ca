"""
vLLM's schedulers with telemetry, and with limits that can change while the engine runs.

The module runs in the engine core and uses private interfaces of vLLM; the contract suite fails
when these change.
"""

import time
from collections import deque
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from services.agent.backends.base import EngineLoad
from services.agent.backends.totals import CheckpointTotals, SchedulingTotals
from services.agent.backends.vllm.core.repetition import CountsRepetitions
from services.agent.backends.vllm.core.structured_outputs import Structured
from services.agent.backends.vllm.core.work import ScheduledWork, work_of
from services.agent.backends.vllm.kv.connector import HostKvConnector
from services.agent.backends.vllm.shared.core_settings import core_settings
from services.agent.backends.vllm.shared.prefill_reports import PrefillTimeReporter
from services.agent.backends.vllm.shared.qos import qos_in_core
from services.agent.backends.vllm.shared.stats import StatsWriter, rank_path
from shared.contracts.telemetry import Iteration
from solver.scheduling.run_ends import RunEnds


class Timed:
    """
    Mixin over a vLLM scheduler that times iterations, publishes the load and applies limits.

    An iteration lasts from `schedule` to `update_from_output`, but begins no earlier than the end
    of the previous one. With asynchronous scheduling its duration is thus the time from one result
    to the next.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Attribute of vLLM, which is untyped.
        self.vllm_config: Any
        self.scheduler_config: Any
        self.kv_cache_manager: Any
        self.kv_cache_config: Any
        self.connector: Any
        self.requests: dict[str, Any]
        self.running: list[Any]
        self.current_step: int
        self.prev_step_scheduled_req_ids: set[str]
        self.block_size: int
        self.max_model_len: int
        self.max_num_scheduled_tokens: int
        self.max_num_active_reqs: int
        self.settings = core_settings(self.vllm_config.additional_config)
        self.in_flight: deque[ScheduledWork] = deque()
        """
        Iterations that were scheduled and have no result yet, oldest first; empty between
        synchronous iterations.
        """
        self.last_end = 0.0
        """End of the last iteration, by the performance counter."""
        self.computes_whole_prompts = not self.scheduler_config.enable_chunked_prefill
        """True for models whose prompts cannot be divided, e.g. encoders."""
        self.has_kv = bool(self.kv_cache_config.kv_cache_groups)
        """False for models without KV, e.g. encoders."""
        self.totals = SchedulingTotals()
        """Counters of the scheduling policy."""
        self._prefills = PrefillTimeReporter()
        self._ends = RunEnds()
        rank = self.vllm_config.parallel_config.data_parallel_index
        self._stats = StatsWriter(rank_path(Path(self.settings.stats_path), rank))
        self._largest_budget = self.max_num_scheduled_tokens
        self._largest_active = self.max_num_active_reqs
        self._publish()

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]  # a mixin
        qos = qos_in_core(request)
        self._ends.add(request.request_id, qos.expires_at, qos.first_token_by)

    def end_expired(self) -> None:
        """
        Abort the requests that are past their ends; the agent aborts their runs as well, and an
        abort of an unknown request is ignored.
        """
        over = self._ends.over(time.time(), lambda name: self.requests[name].num_output_tokens > 0)
        if over:
            self.finish_requests(over, RequestStatus.FINISHED_ABORTED)

    def apply_limits(self) -> None:
        """Set the token budget and the limit of running requests from the next iteration on."""
        token_budget, max_running = self._stats.limits()
        if self.computes_whole_prompts:
            token_budget = self._largest_budget  # a smaller one would never start a longer prompt
        self.max_num_scheduled_tokens = min(
            token_budget or self._largest_budget, self._largest_budget
        )
        self.max_num_active_reqs = min(max_running or self._largest_active, self._largest_active)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        self.end_expired()
        self.apply_limits()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]  # a mixin
        admitted = [data.req_id for data in output.scheduled_new_reqs]
        admitted += output.scheduled_cached_reqs.resumed_req_ids
        for request_id in admitted:
            request = self.requests[request_id]
            # The number includes tokens generated before a preemption; it is fixed until the next
            # preemption.
            request.headway_prefill_tokens = request.num_tokens
            if not request.num_output_tokens:
                self._prefills.times.begin(request_id, begun)
        work = work_of(output.num_scheduled_tokens, self.requests, begun)
        self.on_scheduled(work, admitted)
        # Outputs, including empty ones, return in the order of scheduling.
        self.in_flight.append(work)
        self.on_output(output, admitted)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]  # a mixin
        end = time.perf_counter()
        self._prefills.annotate((each for one in result.values() for each in one.outputs), end)
        work = self.in_flight.popleft()
        duration_s = end - max(work.begun, self.last_end)
        self.last_end = end
        if work.tokens:
            iteration = work.iteration(duration_s)
            self._stats.write(iteration)
            if not work.cut:
                self.on_iteration(work, iteration)
        self._publish()
        return result

    def on_scheduled(self, work: ScheduledWork, admitted: list[str]) -> None:
        """Called when an iteration is decided, with the requests that it has *admitted*."""

    def on_output(self, output: Any, admitted: list[str]) -> None:
        """Called with the result of `schedule`; the last entry of `in_flight` is its work."""

    def on_iteration(self, work: ScheduledWork, iteration: Iteration) -> None:
        """Called at the end of each iteration that computed tokens and was not preempted."""

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]  # a mixin
        self._prefills.times.pause(request.request_id, time.perf_counter())

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]  # a mixin
        for request in finished:
            self._prefills.times.forget(request.request_id)
        # No iteration may follow the last abort, so publish the freed memory now.
        self._publish()
        return finished

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._ends.remove(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]  # a mixin

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]  # a mixin
        if self.connector is not None:
            # Reset the connector's cache regardless of the caller's argument, because the weights
            # may have changed.
            self.connector.reset_cache()
        if not done:
            # vLLM resets nothing while requests run, but this method can drop the blocks that no
            # request owns.
            pool = self.kv_cache_manager.block_pool
            pool.evict_blocks({block.block_id for block in pool.blocks if block.ref_cnt == 0})
        self._publish()
        return done

    def _capacity_tokens(self) -> int:
        """Tokens for which the engine has KV, or that it may compute at once if it has none."""
        capacity: int = (
            self.kv_cache_config.num_blocks * self.block_size
            if self.has_kv
            else self._largest_active * self.max_model_len
        )
        return capacity

    def _publish(self) -> None:
        host = self.connector if isinstance(self.connector, HostKvConnector) else None
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]  # vLLM's
        self._stats.publish(
            EngineLoad(
                running=running,
                waiting=waiting,
                kv_utilization=self.kv_cache_manager.usage,
                kv_capacity_tokens=self._capacity_tokens(),
                token_budget=self.max_num_scheduled_tokens,
                max_running=self._largest_active,
                scheduling=self.totals,
                checkpoints=CheckpointTotals() if host is None else host.totals,
                host_kv_bytes=0 if host is None else host.used_bytes,
                host_kv_capacity_bytes=0 if host is None else host.capacity_bytes,
            )
        )


class TimedScheduler(Timed, Structured, CountsRepetitions, Scheduler):  # type: ignore[misc]  # vLLM is untyped to mypy
    """vLLM's synchronous scheduler with telemetry, limits and resumable answers."""


class AsyncTimedScheduler(Timed, Structured, CountsRepetitions, AsyncScheduler):  # type: ignore[misc]  # vLLM is untyped to mypy
    """vLLM's asynchronous scheduler with telemetry, limits and resumable answers."""
