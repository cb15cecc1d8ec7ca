"""Encodes vLLM's engine-core outputs for the mesh, and decodes them in gateways."""

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

_encoder = MsgpackEncoder()
_decoder = MsgpackDecoder(EngineCoreOutput)


def encode_output(output: EngineCoreOutput) -> tuple[bytes, ...]:
    """The buffers of *output*; empty if it has no more than token ids."""
    if output.new_logprobs is None and output.new_prompt_logprobs_tensors is None:
        return ()
    details = EngineCoreOutput(
        "",
        output.new_token_ids,
        new_logprobs=output.new_logprobs,
        new_prompt_logprobs_tensors=output.new_prompt_logprobs_tensors,
    )
    return tuple(bytes(part) for part in _encoder.encode(details))


def decode_output(parts: tuple[bytes, ...], request_id: str) -> EngineCoreOutput:
    """
    The output in the buffers *parts*, for the request *request_id*.

    Raises:
        Exception: Another version of vLLM encoded the output, or the buffers are damaged.
    """
    output = _decoder.decode(parts)
    output.request_id = request_id
    return output
