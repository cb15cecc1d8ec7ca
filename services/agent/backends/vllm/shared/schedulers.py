"""Scheduler classes of engines; imports no vLLM."""

from typing import Any

STOCK = "services.agent.backends.vllm.core.scheduler.TimedScheduler"
POLICY = "services.agent.backends.vllm.core.policy_scheduler.PolicyScheduler"
PREEMPTIBLE = "services.agent.backends.vllm.core.layer_preemption.PreemptibleScheduler"
_ASYNCHRONOUS = {
    STOCK: "services.agent.backends.vllm.core.scheduler.AsyncTimedScheduler",
    POLICY: "services.agent.backends.vllm.core.policy_scheduler.AsyncPolicyScheduler",
}
"""Synchronous class -> its asynchronous counterpart."""


def fit_scheduler(config: Any) -> None:
    """
    Replace the scheduler class of a `VllmConfig` if vLLM decided to schedule asynchronously.

    vLLM decides while it builds the configuration, by model, device and executor.
    """
    scheduler = config.scheduler_config
    if scheduler.async_scheduling:
        scheduler.scheduler_cls = _ASYNCHRONOUS.get(
            scheduler.scheduler_cls, scheduler.scheduler_cls
        )
