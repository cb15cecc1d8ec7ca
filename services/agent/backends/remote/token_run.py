"""One run in tokens at vLLM's server, over `/v1/completions` with token ids."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from services.agent.backends.base import EngineOutput, EngineRequest
from services.agent.backends.remote.deltas import Delta, read, refusal
from services.agent.backends.remote.server import COMPLETIONS, OK, Server
from services.agent.backends.remote.stream import events_of
from shared.api.events import DONE, data_of
from shared.contracts.errors import ContractError, EngineError
from shared.contracts.requests import FinishReason, Sampling, Tokens


class TokenRun:
    """
    Generates the answer to a prompt in tokens.

    A greedy answer continues after the progress of earlier runs. Other answers depend on the state
    of the random generator and on counts of earlier tokens, so the server generates them from the
    start, with the same seed, and the tokens of the progress are left out.

    Args:
        request: The run.
        model: Name of the model at the server.
        priority: Priority for the server, lower first; None: the server orders by arrival.
        stops: Tokens that end the answer.
    """

    def __init__(
        self, request: EngineRequest, *, model: str, priority: int | None, stops: Tokens
    ) -> None:
        self._continues = continues(request.sampling)
        self._num_known = 0 if self._continues else len(request.progress)
        self._body = self._fields(request) | {"model": model, "stop_token_ids": list(stops)}
        if priority is not None:
            self._body["priority"] = priority
        self._num_tokens = 0
        self._finish: FinishReason | None = None
        self._cached_tokens = 0

    async def outputs(self, server: Server) -> AsyncIterator[list[EngineOutput]]:
        """
        Run the request; yield outputs as they arrive, the last with the finish reason.

        Raises:
            MeshError: The server refuses the request, fails or ends the stream too early.
            Exception: One of `LOST`: the connection broke.
        """
        async with server.posted(COMPLETIONS, msgspec.json.encode(self._body)) as response:
            if response.status != OK:
                raise refusal(response.status, await response.read())
            async for events in events_of(response):
                tokens = tuple(t for event in events for t in self._taken(event))
                if tokens:
                    yield [EngineOutput(token_ids=tokens)]
        if self._finish is None:
            raise EngineError("the server ended the stream before the answer")
        yield [
            EngineOutput(
                token_ids=(), finish_reason=self._finish, cached_tokens=self._cached_tokens
            )
        ]

    def _fields(self, request: EngineRequest) -> dict[str, Any]:
        sampling = request.sampling
        known = len(request.progress) if self._continues else 0
        return {
            "prompt": [*request.prompt, *request.progress[:known]],
            "max_tokens": sampling.max_tokens - known,
            "min_tokens": max(0, sampling.min_tokens - known),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            # The model's end tokens are among the stop tokens, unless they are ignored.
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def _taken(self, event: bytes) -> Tokens:
        """The new tokens of one event."""
        data = data_of(event)
        delta = Delta() if data in (b"", DONE) else read(COMPLETIONS, data)
        self._finish = delta.finish_reason or self._finish
        self._cached_tokens = delta.lengths.cached or self._cached_tokens
        if delta.num_tokens and not delta.token_ids:
            raise ContractError(
                "the server reports no token ids: set `takes` of the model to `bodies`",
                code="server_error",
                status=502,
            )
        known = max(0, self._num_known - self._num_tokens)
        self._num_tokens += len(delta.token_ids)
        return delta.token_ids[known:]


def continues(sampling: Sampling) -> bool:
    """True if the next token of an answer depends on the tokens before only."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return sampling.temperature == 0 and not any(penalties)
