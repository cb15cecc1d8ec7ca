"""One run of a body at a server, which makes the prompt and the answer."""

from collections.abc import AsyncIterator, Collection, Mapping

import msgspec

from services.agent.backends.base import EngineCall, EngineOutput
from services.agent.backends.remote.deltas import (
    NO_LENGTHS,
    Delta,
    Lengths,
    read,
    refusal,
)
from services.agent.backends.remote.server import OK, Server
from services.agent.backends.remote.stream import events_of
from shared.api.events import DONE, data_of, response_of
from shared.contracts.errors import ConnectionBrokenError, ContractError
from shared.contracts.requests import UNKNOWN_TOKEN, FinishReason, Progress, StepDetails

_WITH_USAGE = ("/v1/chat/completions", "/v1/completions")
"""Endpoints whose streams have token counts on demand."""
_USAGE = {"include_usage": True}
PLAIN_FIELDS = (
    *("model", "messages", "prompt", "input", "max_tokens", "temperature", "top_p", "seed"),
    *("stop", "stream", "stream_options"),
)
"""Fields that servers of all makes honour."""
ALL_FIELDS = "*"
_WITHOUT_EFFECT = {"n": b"1"}
"""Field -> value that is the same as no field."""


class BodyRun:
    """
    Passes a body to a server, and its events and its response back as they are.

    The server generates the answer from the start also if earlier runs have begun it: as many
    tokens as they have sent are left out. The rest may then not continue the part that was sent.

    Args:
        call: The body.
        model: Name of the model at the server.
        priority: Priority for the server, lower first; None: the server orders by arrival.
        counts: True if the server reports token counts of streams on demand.
        honoured: Fields that the server honours.

    Raises:
        ContractError: The body has a field that the server does not honour.
    """

    def __init__(
        self,
        call: EngineCall,
        *,
        model: str,
        priority: int | None,
        counts: bool,
        honoured: Collection[str],
    ) -> None:
        self._call = call
        fields = msgspec.json.decode(call.body, type=dict[str, msgspec.Raw])
        self._fields = fields if ALL_FIELDS in honoured else _honoured(fields, honoured)
        self._wants_usage = False
        self._set("model", model)
        if priority is not None:
            self._set("priority", priority)
        if call.streams:
            self._set("stream", value=True)
            self._ask_for_usage(counts=counts)
        progress = call.children[0] if call.children else Progress()
        self._events = list(progress.details)
        """Events of the answer so far, those of earlier runs included."""
        self._num_known = progress.num_tokens
        self._num_tokens = 0
        """Number of tokens of this run."""
        self._held: list[bytes] = []
        """Events without tokens, which are sent with the next tokens."""
        self._finish: FinishReason | None = None
        self._lengths = NO_LENGTHS
        self._usage = b""
        """Event with token counts that is not sent to the client."""

    async def outputs(self, server: Server) -> AsyncIterator[list[EngineOutput]]:
        """
        Run the body; yield outputs as they arrive, the last with the response.

        Raises:
            MeshError: The server refuses the body, fails or ends the stream too early.
            Exception: One of `LOST`: the connection broke.
        """
        body = msgspec.json.encode(self._fields)
        async with server.posted(self._call.endpoint, body) as response:
            if response.status != OK:
                raise refusal(response.status, await response.read())
            if not self._call.streams:
                yield self._whole(await response.read())
                return
            if text := self._text_of_earlier_runs():
                yield [EngineOutput(token_ids=(), text=text, child=0)]
            async for events in events_of(response):
                taken = [self._taken(event) for event in events]
                if outputs := [output for output in taken if output is not None]:
                    yield outputs
        yield self._ended()

    def _set(self, name: str, value: object) -> None:
        self._fields[name] = msgspec.Raw(msgspec.json.encode(value))

    def _ask_for_usage(self, *, counts: bool) -> None:
        asked = msgspec.json.decode(self._call.stream_options or b"null") or {}
        if not isinstance(asked, dict):
            self._set("stream_options", asked)  # the server refuses it
            return
        self._wants_usage = bool(asked.get("include_usage"))
        if counts and self._call.endpoint in _WITH_USAGE:
            asked = asked | _USAGE
        if asked:
            self._set("stream_options", asked)

    def _text_of_earlier_runs(self) -> str:
        return "".join(read(self._call.endpoint, data).text for data in self._data())

    def _taken(self, event: bytes) -> EngineOutput | None:
        """The output of one event; None if it has no new token."""
        data = data_of(event)
        delta = Delta() if data in (b"", DONE) else read(self._call.endpoint, data)
        self._note(delta)
        is_known = self._num_tokens < self._num_known
        self._num_tokens += delta.num_tokens
        is_end = delta.finish_reason is not None or data == DONE
        if delta.only_usage and not is_end and not self._wants_usage:
            self._usage = data  # only the mesh asked for it
            return None
        if is_known and not is_end:
            return None
        self._held.append(event)
        if is_known or not delta.num_tokens:
            return None
        # The event with the end of the answer is sent with the final, which has the verdict.
        return self._output(delta, b"" if is_end else b"\n\n".join(self._held))

    def _output(self, delta: Delta, events: bytes) -> EngineOutput:
        if events:
            self._held.clear()
        tokens = delta.token_ids or (UNKNOWN_TOKEN,) * delta.num_tokens
        details = (StepDetails(len(tokens), events=events),)
        self._events += details
        return EngineOutput(
            token_ids=tokens,
            text=delta.text,
            details=details,
            child=0,
            cached_tokens=self._lengths.cached,
        )

    def _note(self, delta: Delta) -> None:
        self._finish = delta.finish_reason or self._finish
        known, new = self._lengths, delta.lengths
        if new is not NO_LENGTHS:
            self._lengths = Lengths(
                new.prompt or known.prompt,
                new.completion or known.completion,
                new.cached or known.cached,
            )

    def _ended(self) -> list[EngineOutput]:
        """The last outputs of a stream."""
        if self._finish is None:
            raise ConnectionBrokenError("the server ended the stream before the answer")
        if self._held:
            self._events.append(StepDetails(0, events=b"\n\n".join(self._held)))
        return self._last(
            max(0, self._lengths.completion - max(self._num_tokens, self._num_known)),
            b"null" if self._call.events else response_of(self._call.endpoint, self._data()),
        )

    def _data(self) -> list[bytes]:
        events = [event for step in self._events for event in step.events.split(b"\n\n")]
        data = [*(data_of(event) for event in events), self._usage]
        return [each for each in data if each not in (b"", DONE)]

    def _whole(self, response: bytes) -> list[EngineOutput]:
        """The outputs of an answer that comes as a whole."""
        delta = read(self._call.endpoint, response)
        self._note(delta)
        number = max(1, delta.lengths.completion, delta.num_tokens)
        return self._last(max(0, number - self._num_known), response, text=delta.text)

    def _last(self, num_tokens: int, response: bytes, text: str = "") -> list[EngineOutput]:
        end = EngineOutput(
            token_ids=(UNKNOWN_TOKEN,) * num_tokens,
            text=text,
            finish_reason=self._finish or FinishReason.STOP,
            child=0,
            prompt_tokens=self._lengths.prompt,
            cached_tokens=self._lengths.cached,
        )
        return [
            end,
            EngineOutput(token_ids=(), response=response, details=tuple(self._events)),
        ]


def _honoured(
    fields: Mapping[str, msgspec.Raw], honoured: Collection[str]
) -> dict[str, msgspec.Raw]:
    """
    The fields of a body without those that ask for nothing.

    Raises:
        ContractError: Another field is not honoured.
    """
    kept = {}
    for name, value in fields.items():
        if name in honoured:
            kept[name] = value
        elif bytes(value) not in (b"null", _WITHOUT_EFFECT.get(name)):
            raise ContractError(
                f"the servers of this model do not support {name[:80]}",
                code="unsupported_parameter",
                param=name[:80],
            )
    return kept
