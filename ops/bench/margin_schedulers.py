"""Schedulers for the arms of `ops.bench engine_margins`: the policy with a given latency margin."""

from typing import Any

from msgspec.structs import replace

from services.agent.backends.policies import create_policy
from services.agent.backends.vllm.core.layer_preemption import PreemptibleScheduler


class _WithMargin(PreemptibleScheduler):
    margin: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.settings
        self._policy = create_policy(
            settings.policy,
            self._learner.table,
            replace(settings.scheduling, latency_margin=self.margin),
        )


class NoMargin(_WithMargin):
    """Scheduler that reserves no time for prediction errors."""

    margin = 0.0


class FivePercent(_WithMargin):
    """Scheduler that reserves 5 % of the time until the next token is due."""

    margin = 0.05
