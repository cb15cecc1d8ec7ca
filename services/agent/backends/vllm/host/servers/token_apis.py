"""Requests and outputs of an engine core in the two APIs of vLLM's server that take tokens."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinish
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from services.agent.backends.remote.deltas import refusal
from services.agent.backends.remote.server import COMPLETIONS, GENERATE
from services.agent.backends.vllm.shared.qos import QOS_KEY
from shared.api.events import DONE

_TEXT_FIELDS = frozenset(
    {
        "stop",
        "include_stop_str_in_output",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_kind",
        "output_text_buffer_length",
        "stream_interval",
        "skip_clone",
        "flat_logprobs",
        "n",
        "skip_reading_prefix_cache",  # vLLM derives it from the others
    }
)
"""Sampling parameters about text and outputs: gateway and host make the text of the tokens."""
_ALWAYS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids"),
)
"""Parameters that are sent with their defaults too, since a server may have other defaults."""
_NOWHERE = frozenset({"prompt_logprobs", "prompt_logprob_token_ids", "logprob_token_ids"})
"""Parameters whose results are in no stream."""
_IN_COMPLETIONS = frozenset(
    {
        *_ALWAYS,
        *("seed", "logprobs", "watermarking", "logit_bias", "allowed_token_ids", "bad_words"),
        *("structured_outputs", "repetition_detection", "thinking_token_budget"),
    }
)
"""Parameters that `/v1/completions` takes under the same names."""
_ID_PREFIX = "token_id:"
_FINISHES = {str(reason): reason for reason in EngineFinish}


class Candidate(msgspec.Struct, frozen=True):
    """A token and its log probability at one position of an answer."""

    token_id: int
    logprob: float
    rank: int | None = None
    """Rank among all tokens, from 1; None: not reported."""


class TokenApi(Protocol):
    """One API of vLLM's server that takes and returns tokens."""

    path: ClassVar[str]

    def body(self, request: EngineCoreRequest) -> dict[str, Any]:
        """
        Body for *request*, without the model's name and the priority.

        Raises:
            ValueError: The API does not carry a part of the request; the message names it.
        """

    def output(self, request: EngineCoreRequest, data: bytes) -> EngineCoreOutput | None:
        """
        The engine core's output in the data of one event; None if it has none.

        Raises:
            MeshError: The data are an error.
            msgspec.DecodeError: The data are not of this API.
        """


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None

    @property
    def stats(self) -> PrefillStats | None:
        details = self.prompt_tokens_details
        return PrefillStats(num_cached_tokens=details.cached_tokens or 0) if details else None


_NO_USAGE = _Usage()


class _Position(Candidate, frozen=True):
    top_logprobs: tuple[Candidate, ...] = ()


class _Positions(msgspec.Struct, frozen=True):
    content: tuple[_Position, ...] | None = None


class _GenerateChoice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...] | None = None
    logprobs: _Positions | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _GenerateEvent(msgspec.Struct, frozen=True):
    choices: tuple[_GenerateChoice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


class GenerateApi:
    """`/inference/v1/generate`, which takes all sampling parameters; `--enable-scale-out`."""

    path: ClassVar[str] = GENERATE
    _decode = msgspec.json.Decoder(_GenerateEvent).decode

    def body(self, request: EngineCoreRequest) -> dict[str, Any]:
        body = {
            "token_ids": request.prompt_token_ids,
            "sampling_params": _fields(request.sampling_params),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        optional = {
            "cache_salt": _salt(request),
            "reasoning_parser_kwargs": request.reasoning_parser_kwargs,
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    def output(self, request: EngineCoreRequest, data: bytes) -> EngineCoreOutput | None:
        event = self._decode(data)
        if event.error:
            raise refusal(500, data)
        for choice in event.choices:
            content = choice.logprobs.content if choice.logprobs else None
            positions = [(each, *each.top_logprobs) for each in content or ()]
            return _output(
                request, choice.token_ids or (), positions, choice.finish_reason, choice.stop_reason
            )
        return _usage_only(request, event.usage)


class _CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: tuple[str, ...] = ()
    token_logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[dict[str, float] | None, ...] = ()

    @property
    def positions(self) -> list[tuple[Candidate, ...]]:
        """The sampled token of each position, then its other candidates."""
        tops: Iterable[dict[str, float] | None] = self.top_logprobs or (None,) * len(self.tokens)
        return [
            (
                Candidate(_token_id(token), logprob or 0.0),
                *(Candidate(_token_id(name), value) for name, value in (top or {}).items()),
            )
            for token, logprob, top in zip(self.tokens, self.token_logprobs, tops, strict=True)
        ]


class _CompletionChoice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...] | None = None
    logprobs: _CompletionLogprobs | None = None
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _CompletionEvent(msgspec.Struct, frozen=True):
    choices: tuple[_CompletionChoice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


class CompletionsApi:
    """`/v1/completions` with token ids, which every server of vLLM has."""

    path: ClassVar[str] = COMPLETIONS
    _decode = msgspec.json.Decoder(_CompletionEvent).decode

    def body(self, request: EngineCoreRequest) -> dict[str, Any]:
        fields = _fields(request.sampling_params)
        missing = sorted(fields.keys() - _IN_COMPLETIONS)
        if missing:
            raise ValueError(
                f"the server's {self.path} does not take {', '.join(missing)}; "
                f"{GENERATE} does (vllm serve --enable-scale-out)"
            )
        body = fields | {
            "prompt": request.prompt_token_ids,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        salt = _salt(request)
        return body | ({"cache_salt": salt} if salt else {})

    def output(self, request: EngineCoreRequest, data: bytes) -> EngineCoreOutput | None:
        event = self._decode(data)
        if event.error:
            raise refusal(500, data)
        for choice in event.choices:
            if choice.text and not choice.token_ids:
                raise ValueError(
                    "the server reports no token ids: set `takes` of the model to `bodies`"
                )
            positions = choice.logprobs.positions if choice.logprobs else []
            return _output(
                request, choice.token_ids or (), positions, choice.finish_reason, choice.stop_reason
            )
        return _usage_only(request, event.usage)


def data_is_end(data: bytes) -> bool:
    """True for the data of events without an output: the end of a stream, and keep-alives."""
    return data in (b"", DONE)


def _fields(params: SamplingParams) -> dict[str, Any]:
    """
    The sampling parameters of one run.

    Raises:
        ValueError: No stream has the results of a parameter.
    """
    fields = {name: getattr(params, name) for name in _ALWAYS}
    fields |= {
        name: value
        for name, value in msgspec.to_builtins(params).items()
        if name not in _TEXT_FIELDS and not name.startswith("_")
    }
    if unsupported := sorted(fields.keys() & _NOWHERE):
        raise ValueError(f"a server of others does not stream {', '.join(unsupported)}")
    extra = {name: value for name, value in (params.extra_args or {}).items() if name != QOS_KEY}
    fields["extra_args"] = extra
    if fields.get("structured_outputs"):
        fields["structured_outputs"] = _public(fields["structured_outputs"])
    return {name: value for name, value in fields.items() if value not in (None, {})}


def _salt(request: EngineCoreRequest) -> str | None:
    """Digest of the salt, which has the tenant in characters that servers refuse."""
    salt = request.cache_salt
    return sha256(salt.encode()).hexdigest() if salt else None


def _public(values: dict[str, Any]) -> dict[str, Any]:
    """The fields that a client may set."""
    return {
        name: value
        for name, value in values.items()
        if value is not None and not name.startswith("_")
    }


def _output(
    request: EngineCoreRequest,
    token_ids: Sequence[int],
    positions: Sequence[tuple[Candidate, ...]],
    finish: str | None,
    stop: int | str | None,
) -> EngineCoreOutput:
    """An output of the engine core; a finish reason that vLLM does not have ends it as an error."""
    num = request.sampling_params.logprobs
    return EngineCoreOutput(
        request.request_id,
        list(token_ids),
        new_logprobs=_logprobs(positions, num) if positions and num is not None else None,
        finish_reason=None if finish is None else _FINISHES.get(finish, EngineFinish.ERROR),
        stop_reason=stop,
    )


def _usage_only(request: EngineCoreRequest, usage: _Usage | None) -> EngineCoreOutput | None:
    """An output with the number of cached tokens only; None if it is not reported."""
    stats = (usage or _NO_USAGE).stats
    return None if stats is None else EngineCoreOutput(request.request_id, [], prefill_stats=stats)


def _logprobs(positions: Sequence[tuple[Candidate, ...]], num: int) -> LogprobsLists:
    """
    Log probabilities of several positions, as an engine core has them.

    Args:
        positions: The sampled token of each position, then other candidates, which may repeat it.
        num: Number of most likely tokens that the request asks for.

    Returns:
        Arrays of shape (positions, `num` + 1): the sampled token, then the most likely tokens,
        which may include it.
    """
    rows = [_row(sampled, others, num) for sampled, *others in positions]
    width = min(len(row) for row, _ in rows)
    return LogprobsLists(
        np.array([[each.token_id for each in row[:width]] for row, _ in rows], dtype=np.int32),
        np.array([[each.logprob for each in row[:width]] for row, _ in rows], dtype=np.float32),
        np.array([rank for _, rank in rows], dtype=np.int32),
    )


def _row(sampled: Candidate, others: Sequence[Candidate], num: int) -> tuple[list[Candidate], int]:
    """One position's candidates, the sampled token first, and the rank of the sampled token."""
    unique = {each.token_id: each for each in (*others, sampled)}
    # The server adds a sampled token that is not among the most likely ones.
    is_likely = num > 0 and len(unique) <= num
    likely = sorted(
        (each for each in unique.values() if is_likely or each.token_id != sampled.token_id),
        key=lambda each: -each.logprob,
    )
    rank = sampled.rank
    if rank is None:
        rank = 1 + sum(each.logprob > sampled.logprob for each in likely)
    return [sampled, *likely[: max(0, num)]], rank


def _token_id(token: str) -> int:
    """
    Id in a token's name, `token_id:ID`.

    Raises:
        ValueError: The server names tokens by their text.
    """
    if not token.startswith(_ID_PREFIX):
        raise ValueError("the server does not name tokens by their ids")
    return int(token.removeprefix(_ID_PREFIX))
