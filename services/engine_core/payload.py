"""Encodes vLLM's engine-core requests for the mesh, and decodes them in engine hosts."""

from copy import copy

import vllm
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from shared.contracts.errors import ContractError
from shared.contracts.requests import EnginePayload

VERSION = str(vllm.__version__).partition("+")[0]
"""Version of vLLM without the build suffix."""
_encoder = MsgpackEncoder()
_decoder = MsgpackDecoder(EngineCoreRequest)


def encode_request(request: EngineCoreRequest) -> EnginePayload:
    """
    Payload of *request*, without its id, prompt tokens, arrival time, priority and adapter, which
    the mesh carries in fields of its own.
    """
    stripped = copy(request)
    stripped.request_id = ""
    stripped.external_req_id = None
    stripped.prompt_token_ids = None
    stripped.arrival_time = 0.0
    stripped.priority = 0
    stripped.lora_request = None
    parts = _encoder.encode(stripped)
    return EnginePayload(version=VERSION, parts=tuple(bytes(part) for part in parts))


def decode_request(payload: EnginePayload) -> EngineCoreRequest:
    """
    The request in *payload*, without the fields that `encode_request` removes.

    Raises:
        ContractError: Another version of vLLM encoded the request, or the payload is invalid.
    """
    if payload.version != VERSION:
        raise ContractError(
            f"vLLM {payload.version} encoded the request, but this engine is vLLM {VERSION}; "
            "gateways and engines need the same version",
            param="engine",
        )
    try:
        return _decoder.decode(payload.parts)
    except Exception as error:  # a decoder of nested structs raises many kinds of errors
        raise ContractError(f"the encoded request is invalid: {error}", param="engine") from error
