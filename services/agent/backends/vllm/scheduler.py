"""
vLLM's scheduler with telemetry and limits that change at run time. Runs in the engine core.

The interfaces of vLLM used here are private to it; the contract suite fails when they change.
"""

import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from services.agent.backends.vllm.stats import EngineLoad, StatsWriter
from shared.contracts.telemetry import Iteration

CONFIG_KEY = "headway"
"""Our part of vLLM's `additional_config`: `{"stats_path": ...}`."""


class TimedScheduler(Scheduler):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    Times iterations, shows the load, obeys the front's limits.

    For synchronous scheduling, where an iteration lies between `schedule` and
    `update_from_output`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config.additional_config[CONFIG_KEY]
        self._stats = StatsWriter(Path(config["stats_path"]))
        self._largest_budget: int = self.max_num_scheduled_tokens
        self._largest_active: int = self.max_num_active_reqs
        self._publish()

    def apply_limits(self) -> None:
        """Set the next iteration's token budget and most running requests."""
        token_budget, max_running = self._stats.limits()
        self.max_num_scheduled_tokens = min(
            token_budget or self._largest_budget, self._largest_budget
        )
        self.max_num_active_reqs = min(max_running or self._largest_active, self._largest_active)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.apply_limits()
        begun = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        # The same object comes back in `update_from_output`.
        output.headway_begun = begun
        output.headway_counts = self._counts(output.num_scheduled_tokens)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().update_from_output(scheduler_output, *args, **kwargs)
        end = time.perf_counter()
        compute, context, decodes = scheduler_output.headway_counts
        iteration = Iteration(
            compute_tokens=compute,
            context_tokens=context,
            num_decodes=decodes,
            duration_s=end - scheduler_output.headway_begun,
        )
        if compute:
            self._stats.write(iteration)
        self.on_iteration(iteration)
        self._publish()
        return result

    def on_iteration(self, iteration: Iteration) -> None:
        """An iteration is over; may have computed nothing."""

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        # After the last abort there may be no iteration that would show the freed memory.
        self._publish()
        return finished

    def _counts(self, num_scheduled: dict[str, int]) -> tuple[int, int, int]:
        """Tokens to compute, their context, and decodes; called after `schedule` advanced it."""
        compute = context = decodes = 0
        for request_id, count in num_scheduled.items():
            request = self.requests[request_id]
            before = request.num_computed_tokens - count
            compute += count
            context += before
            decodes += before >= request.num_prompt_tokens
        return compute, context, decodes

    def _publish(self) -> None:
        running, waiting = self.get_request_counts()
        self._stats.publish(
            EngineLoad(
                running=running,
                waiting=waiting,
                kv_utilization=self.kv_cache_manager.usage,
                kv_capacity_tokens=self.kv_cache_config.num_blocks * self.block_size,
            )
        )
