"""How long an application's answers are (QoServe §3.4)."""

from solver.prediction.moments import RunningMoments, over_approximation

_ENOUGH = 10


class DecodeHistory:
    """
    Expected answer lengths from finished requests: `moments.over_approximation`.

    Source: QoServe §3.4.

    Args:
        default_tokens: Expected of an application with fewer than ten answers so far.
    """

    def __init__(self, *, default_tokens: float) -> None:
        self._default_tokens = default_tokens
        self._moments: dict[str, RunningMoments] = {}
        self._expected: dict[str, float] = {}

    def observe(self, application: str, output_tokens: int) -> None:
        """A request finished with *output_tokens*."""
        moments = self._moments.get(application)
        if moments is None:
            moments = self._moments[application] = RunningMoments()
        moments.observe(output_tokens)
        value = moments.value()
        if value is not None and value.count >= _ENOUGH:
            self._expected[application] = over_approximation(value)

    def expected_tokens(self, application: str, max_tokens: int) -> float:
        """Length to plan with, at most *max_tokens*."""
        return min(max_tokens, self._expected.get(application, self._default_tokens))
