"""The simulated model: the next token is a hash of the model's name and all previous tokens."""

from collections.abc import Iterable
from hashlib import blake2b

from services.agent.backends.base import EngineRequest
from shared.contracts.requests import Tokens

_WIDTH = 4
_RETRIES = 8


def _packed(token_ids: Iterable[int]) -> bytes:
    return b"".join(token.to_bytes(_WIDTH, "little") for token in token_ids)


class TokenSource:
    """
    Generates the tokens of one answer.

    A token depends only on the names of the model and the adapter, the previous tokens and, for
    random sampling, the seed. A resumed run therefore continues exactly as the earlier run would
    have.

    Args:
        stops: Tokens that end the answer.
        first_token: Smallest ordinary token id; lower ids are special.
        vocab_size: Exclusive upper bound of token ids.
        mean_output_tokens: Mean length of answers that end with a token of *stops*.
    """

    def __init__(
        self,
        request: EngineRequest,
        stops: Tokens,
        *,
        first_token: int,
        vocab_size: int,
        mean_output_tokens: int,
    ) -> None:
        sampling = request.sampling
        seed = "" if sampling.temperature == 0 else f"{sampling.seed or 0}"
        adapter = "" if request.adapter is None else f"{request.adapter}/"
        self._hash = blake2b(f"{request.model}/{seed}/{adapter}".encode(), digest_size=8)
        self._hash.update(_packed(request.prompt))
        self._hash.update(_packed(request.progress))
        self._stops = stops
        self._first_token = first_token
        self._num_tokens = vocab_size - first_token
        self._mean_output_tokens = mean_output_tokens

    def next(self, *, may_stop: bool) -> int:
        """Return the next token of the answer; a stop token is possible only if *may_stop*."""
        drawn = int.from_bytes(self._hash.digest(), "little")
        if may_stop and self._stops and drawn % self._mean_output_tokens == 0:
            token = self._stops[0]
        else:
            drawn //= self._mean_output_tokens
            token = self._first_token + drawn % self._num_tokens
            for _ in range(0 if may_stop else _RETRIES):
                if token not in self._stops:
                    break
                token = self._first_token + (token + 1 - self._first_token) % self._num_tokens
        self._hash.update(token.to_bytes(_WIDTH, "little"))
        return token
