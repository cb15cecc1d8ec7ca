"""Preemption of the running iteration by an arriving online request (ConServe §4.3)."""

from dataclasses import dataclass

from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningIteration:
    """An iteration that has begun; its times are by the caller's clock."""

    began_at: float
    predicted_s: Seconds
    """Predicted duration of the whole iteration."""
    decodes_s: Seconds = 0.0
    """Predicted time of the iteration's decodes alone; 0 if the iteration has no prefill."""
    online_tokens: int = 0
    offline_tokens: int = 0
    """Tokens of requests without a target, which a safepoint may drop."""

    def left_s(self, now: float) -> Seconds:
        """Predicted time to the end of the iteration; 0 if its predicted end has passed."""
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
    Return True if the offline part of *iteration* should be dropped at the next safepoint.

    Args:
        iteration: The iteration that runs while an online request arrives.
        now: Time by the clock of *iteration*.
        online_s: Predicted prefill time of the online request and all online requests before it.
        slack_s: Time until the first token of the online request is due; negative if it is late.
        prefill_s: Least predicted prefill time of the online request alone.

    Source: ConServe algorithm 2: offline work is dropped if the remaining iteration and the online
    prefills take longer than the TTFT objective.
    Decided: the objective is the time left of the request's own target. Prefills get the part of
    each iteration that decodes do not use. Nothing is dropped if the predicted end of the iteration
    has passed, or if the request is late in any case and would only be relegated.
    """
    if iteration.offline_tokens <= 0 or prefill_s > slack_s:
        return False
    left_s = iteration.left_s(now)
    return left_s > 0 and left_s + online_s * iteration.stretch > slack_s
