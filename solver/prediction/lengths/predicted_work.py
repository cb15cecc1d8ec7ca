"""Predicted work of an arriving request, before its answer has begun."""

from dataclasses import dataclass, field

from shared.contracts.base import ModelName
from shared.contracts.estimates import OutputTokens, Profile
from shared.contracts.requests import QueuedRequest
from solver.prediction.latency.service_time import ALL_APPLICATIONS

LEVEL = 0.9
"""Level of the quantile that is assumed as the length of an answer."""
UNKNOWN_TOKENS = 256
"""Length of answers that is assumed before the estimator has published lengths of a model."""


@dataclass(slots=True)
class PredictedWork:
    """
    Predicts the length of an answer: a high quantile, at most the request's limit.

    Limits are often far above the lengths of answers, so work classes and rooms by limits would
    only reflect the usual settings of clients.

    Decided: QLM §6 clusters by lengths without defining them. Here the length is a high quantile:
    with mean lengths, unexpectedly long answers would delay the short answers of their class.
    """

    _lengths: dict[ModelName, dict[str, OutputTokens]] = field(default_factory=dict)
    _versions: dict[ModelName, int] = field(default_factory=dict)

    def learn(self, profile: Profile) -> None:
        """
        Adopt the estimator's answer lengths of a model; profiles older than the known profile are
        ignored.
        """
        if profile.version >= self._versions.get(profile.model, 0) and profile.output_tokens:
            self._versions[profile.model] = profile.version
            self._lengths[profile.model] = profile.output_tokens

    def answer_tokens(self, request: QueuedRequest) -> int:
        """
        Predicted number of tokens of the answers to *request*, at most the request's limit; 0 if
        the model pools.
        """
        if request.pools:
            return 0
        limit = request.sampling.max_tokens
        if request.sampling.ignore_eos:
            return limit
        lengths = self._lengths.get(request.model.base, {})
        predicted = lengths.get(request.application) or lengths.get(ALL_APPLICATIONS)
        quantile = None if predicted is None else dict(predicted.quantiles).get(LEVEL)
        tokens = UNKNOWN_TOKENS if quantile is None else max(1, round(quantile))
        return min(limit, request.num_answers * tokens)
