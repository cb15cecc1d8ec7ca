"""Predicted lengths in tokens of prompts that are not tokenized yet."""

from dataclasses import dataclass, field

import numpy as np

from shared.contracts.base import ModelName
from shared.contracts.requests import PromptText
from solver.prediction.least_squares import Floats, non_negative

_PRIOR_WEIGHT = 0.5
"""Weight of the prior: the number of prompts that it counts as."""
_MESSAGE_TOKENS = 50.0
"""Assumed tokens of a message; determines the weight of the chat template's tokens in the prior."""
_MAX_DEVIATION = 8.0
"""
Largest ratio between the actual and the predicted length of a prompt from which the model learns.
"""


@dataclass(slots=True)
class _ModelLengths:
    """Normal equations of tokens = tokens_per_byte · bytes + tokens_per_message · messages."""

    tokens_per_byte: float
    tokens_per_message: float = 0.0
    matrix: Floats = field(default_factory=lambda: np.zeros((2, 2)))
    vector: Floats = field(default_factory=lambda: np.zeros(2))

    def tokens(self, text: PromptText) -> float:
        return self.tokens_per_byte * text.num_bytes + self.tokens_per_message * text.num_messages


class PromptLengths:
    """
    Learned per model: bytes per token, and tokens that the chat template adds to each message.

    Non-negative relative least squares with forgetting; the registry's bytes per token are the
    prior.

    Decided: in QUARTZ and QoServe the prompt's length is known at arrival. Here a producer may
    publish text without the gateway, and its tokens are counted only when an engine serves the
    request.

    Args:
        memory: Number of prompts after which an old prompt weighs 1/e.
    """

    def __init__(self, *, memory: float = 500.0) -> None:
        self._keep = float(np.exp(-1 / memory))
        self._models: dict[ModelName, _ModelLengths] = {}

    def tokens(self, model: ModelName, text: PromptText, *, bytes_per_token: float) -> int:
        """
        Predicted length of *text* in tokens, at least 1.

        Args:
            model: Model whose tokenizer is used.
            bytes_per_token: Assumed as long as nothing was learned; above 0.
        """
        known = self._models.get(model) or _ModelLengths(tokens_per_byte=1 / bytes_per_token)
        return max(1, round(known.tokens(text)))

    def observe(
        self, model: ModelName, text: PromptText, tokens: int, *, bytes_per_token: float
    ) -> None:
        """Learn that *text* has *tokens* tokens; an empty text is ignored."""
        if tokens <= 0 or text.num_bytes <= 0:
            return
        prior = 1 / bytes_per_token
        ratio = tokens / (prior * text.num_bytes + text.num_messages)
        if not 1 / _MAX_DEVIATION <= ratio <= _MAX_DEVIATION:
            return
        lengths = self._models.setdefault(model, _ModelLengths(tokens_per_byte=prior))
        terms = np.array([text.num_bytes, text.num_messages], dtype=np.float64) / tokens
        lengths.matrix = self._keep * lengths.matrix + np.outer(terms, terms)
        lengths.vector = self._keep * lengths.vector + terms
        lengths.tokens_per_byte, lengths.tokens_per_message = _solve(lengths, prior)

    def bytes_per_token(self) -> dict[ModelName, float]:
        """Learned bytes per token; infinite if the fit assigns all tokens to the chat template."""
        return {
            model: 1 / lengths.tokens_per_byte if lengths.tokens_per_byte > 0 else np.inf
            for model, lengths in self._models.items()
        }


def _solve(lengths: _ModelLengths, prior: float) -> tuple[float, float]:
    """
    Coefficients fitted to the observations and to *prior*, tokens per byte, which counts as
    `_PRIOR_WEIGHT` prompts.
    """
    anchor = _PRIOR_WEIGHT * np.diag([1 / prior**2, 1 / _MESSAGE_TOKENS**2])
    matrix = lengths.matrix + anchor
    vector = lengths.vector + np.array([_PRIOR_WEIGHT / prior, 0.0])
    per_byte, per_message = non_negative(matrix, vector).tolist()
    return per_byte, per_message
