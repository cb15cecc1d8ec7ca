"""A running request that tests pass to policies."""

from dataclasses import dataclass

from shared.contracts.base import RequestId


@dataclass(kw_only=True)
class Running:
    """Implements `solver.scheduling.engine.decision.RunningView`."""

    request_id: RequestId
    num_prefill_tokens: int = 1000
    num_computed_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def is_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens
