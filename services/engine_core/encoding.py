"""Encoding of vLLM's engine-core requests and outputs in messages of the mesh."""

from collections.abc import Iterable
from copy import copy
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from services.agent.backends.base import EnginePayload
from shared.contracts.errors import ContractError

_DETAILS = ("new_logprobs", "new_prompt_logprobs_tensors", "pooling_output")
"""Fields of outputs beyond token ids that gateways read."""
# An encoder has state while it encodes, and engine hosts encode requests in another thread.
_request_encoder = MsgpackEncoder()
_output_encoder = MsgpackEncoder()
_request_decoder = MsgpackDecoder(EngineCoreRequest)
_output_decoder = MsgpackDecoder(EngineCoreOutput)
_list_decoder = MsgpackDecoder(list[EngineCoreRequest])


def encode_request(request: EngineCoreRequest) -> EnginePayload:
    """
    Payload of *request*, without its id, prompt tokens, arrival time, priority and adapter, which
    the run carries in fields of its own.
    """
    return _payload(_stripped(request))


def encode_requests(requests: Iterable[EngineCoreRequest]) -> EnginePayload:
    """Payload of the inputs of one request to a pooling model; otherwise like `encode_request`."""
    return _payload([_stripped(request) for request in requests])


def _stripped(request: EngineCoreRequest) -> EngineCoreRequest:
    stripped = copy(request)
    stripped.request_id = ""
    stripped.external_req_id = None
    stripped.prompt_token_ids = None
    stripped.arrival_time = 0.0
    stripped.priority = 0
    stripped.lora_request = None
    return stripped


def _payload(content: object) -> EnginePayload:
    return EnginePayload(tuple(bytes(part) for part in _request_encoder.encode(content)))


def decode_request(payload: EnginePayload) -> EngineCoreRequest:
    """
    The request in *payload*, without the fields that `encode_request` removes.

    Raises:
        ContractError: The payload is invalid.
    """
    request: EngineCoreRequest = _decoded(_request_decoder, payload)
    return request


def decode_requests(payload: EnginePayload) -> list[EngineCoreRequest]:
    """
    The inputs in *payload*, without the fields that `encode_requests` removes.

    Raises:
        ContractError: The payload is invalid.
    """
    requests: list[EngineCoreRequest] = _decoded(_list_decoder, payload)
    return requests


def _decoded(decoder: MsgpackDecoder, payload: EnginePayload) -> Any:
    try:
        # Tensors share the memory of the buffers, which torch expects to be writable.
        return decoder.decode([bytearray(part) for part in payload.parts])
    except Exception as error:  # a decoder of nested structs raises many kinds of errors
        raise ContractError(f"the encoded request is invalid: {error}", param="engine") from error


def encode_output(output: EngineCoreOutput) -> tuple[bytes, ...]:
    """The buffers of *output*; empty if it has no more than token ids."""
    details = {name: getattr(output, name) for name in _DETAILS}
    if all(value is None for value in details.values()):
        return ()
    encoded = _output_encoder.encode(EngineCoreOutput("", output.new_token_ids, **details))
    return tuple(bytes(part) for part in encoded)


def decode_output(parts: tuple[bytes, ...], request_id: str) -> EngineCoreOutput:
    """
    The output in the buffers *parts*, for the request *request_id*.

    Raises:
        Exception: Another version of vLLM encoded the output, or the buffers are damaged.
    """
    # The tensors share the memory of the buffers, which torch expects to be writable.
    output = _output_decoder.decode([bytearray(part) for part in parts])
    output.request_id = request_id
    return output
