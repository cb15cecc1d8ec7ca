"""How much work a request is taken to be when it comes, before anything of its answer is known."""

from dataclasses import dataclass, field

from shared.contracts.base import ModelName
from shared.contracts.estimates import OutputTokens, Profile
from shared.contracts.requests import QueuedRequest
from solver.prediction.service_time import ALL_APPLICATIONS

LEVEL = 0.9
"""Nine of ten answers are no longer than what they are taken to be."""


@dataclass(slots=True)
class PredictedWork:
    """
    Prompt and a high quantile of the answer, at most what the request allows.

    Limits are often far above what answers need: classes of work by limits tell long requests
    from short ones by what their clients were used to write.

    Decided: QLM §6 clusters by lengths without saying which; a mean would put a class's long
    half where it holds up others.
    """

    _lengths: dict[ModelName, dict[str, OutputTokens]] = field(default_factory=dict)
    _versions: dict[ModelName, int] = field(default_factory=dict)

    def learn(self, profile: Profile) -> None:
        """What the estimator knows of a model's answers; older than what is known is ignored."""
        if profile.version >= self._versions.get(profile.model, 0) and profile.output_tokens:
            self._versions[profile.model] = profile.version
            self._lengths[profile.model] = profile.output_tokens

    def tokens(self, request: QueuedRequest) -> int:
        """Tokens to compute for *request*, all in all."""
        limit = request.sampling.max_tokens
        lengths = self._lengths.get(request.model.base, {})
        told = lengths.get(request.application) or lengths.get(ALL_APPLICATIONS)
        quantile = None if told is None else dict(told.quantiles).get(LEVEL)
        if quantile is None or request.sampling.ignore_eos:
            return request.prompt_tokens + limit
        return request.prompt_tokens + min(limit, round(quantile))
