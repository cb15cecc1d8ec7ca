"""Preemption of the running iteration by an arriving online request (ConServe §4.3)."""

from dataclasses import dataclass

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningIteration:
    """An iteration that has begun, by the caller's clock."""

    began_at: float
    predicted_s: Seconds
    """Duration of the whole iteration."""
    decodes_s: Seconds = 0.0
    """Time that its decodes would take alone; 0 when it has no prefill."""
    online_tokens: int = 0
    offline_tokens: int = 0
    """Tokens of requests without a target, which a safepoint may drop."""

    def left_s(self, now: float) -> Seconds:
        """Predicted time to its end; 0 when it should have ended."""
        return max(0.0, self.began_at + self.predicted_s - now)

    @property
    def stretch(self) -> float:
        """Factor by which the decodes of this iteration slow down prefills."""
        prefills_s = self.predicted_s - self.decodes_s
        return self.predicted_s / prefills_s if prefills_s > 0 else 1.0


def preempts(
    iteration: RunningIteration,
    *,
    now: float,
    online_s: Seconds,
    slack_s: Seconds,
    prefill_s: Seconds = 0.0,
) -> bool:
    """
    Return whether the offline part of *iteration* is dropped at its next safepoint.

    Args:
        iteration: The iteration that runs while an online request arrives.
        now: By the iteration's clock.
        online_s: Predicted prefill of that request and of all online ones before it.
        slack_s: Time until its first token is due; negative if it is late.
        prefill_s: Predicted prefill of that request alone, at least.

    Source: ConServe algorithm 2: dropped if the rest of the iteration and the online prefills
    take longer than the TTFT objective; never without offline work.
    Decided: the objective is the time left of the request's own target; prefills get the part of
    each iteration that decodes leave; nothing is dropped of an iteration that should have ended,
    nor for a request that is late in any case, which would only be relegated.
    """
    if iteration.offline_tokens <= 0 or prefill_s > slack_s:
        return False
    left_s = iteration.left_s(now)
    return left_s > 0 and left_s + online_s * iteration.stretch > slack_s
