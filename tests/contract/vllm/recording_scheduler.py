"""Schedulers for vLLM's engine core that record each iteration; imports vLLM."""

from typing import Any

from services.agent.backends.vllm.core.policy_scheduler import PolicyScheduler
from tests.contract.vllm.recorded_engines import recorded_policy
from tests.contract.vllm.recording import recording


class _Recording(PolicyScheduler):
    name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The policy's latency model is not updated, so that a replay needs only the record.
        self._policy = recording(recorded_policy(self.name))


class RecordedFcfs(_Recording):
    name = "fcfs"


class RecordedEdf(_Recording):
    name = "edf"


class RecordedQoserve(_Recording):
    name = "qoserve"
