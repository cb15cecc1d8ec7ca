"""Schedulers for vLLM's engine core that write down each iteration; imports vLLM."""

from typing import Any

from services.agent.backends.vllm.policy_scheduler import PolicyScheduler
from tests.recorded_engines import recorded_policy
from tests.recording import recording


class _Recording(PolicyScheduler):
    name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Not told of better latency models, so that a replay needs only what is recorded.
        self._policy = recording(recorded_policy(self.name))


class RecordedFcfs(_Recording):
    name = "fcfs"


class RecordedEdf(_Recording):
    name = "edf"


class RecordedQoserve(_Recording):
    name = "qoserve"
