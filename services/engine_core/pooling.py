"""What a pooling model makes of one input: the size of the output, and the output for vLLM."""

from vllm.config import ModelConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinish

from services.engine_core.encoding import decode_output
from shared.contracts.requests import StepDetails

_BY_TOKEN = ("token_embed", "token_classify")
"""Tasks whose output has one vector for each token."""


def vector_width(model_config: ModelConfig) -> int:
    """Largest length of the vectors that a pooling model makes; 0 for other models."""
    if model_config.runner_type != "pooling":
        return 0
    num_labels = getattr(model_config.hf_config, "num_labels", 0)
    return max(int(model_config.embedding_size), int(num_labels))


def num_values(request: EngineCoreRequest, *, width: int) -> int:
    """
    Count of numbers in the output of an input.

    Args:
        request: The input.
        width: Length of the vectors that the model makes, unless the request asks for another one.
    """
    params = request.pooling_params
    if params is None:
        return width
    num_vectors = len(request.prompt_token_ids or ()) if params.task in _BY_TOKEN else 1
    return num_vectors * (params.dimensions or width)


def pooled_output(step: StepDetails, request_id: str) -> EngineCoreOutput:
    """
    The output of an input, as an engine core reports it.

    Args:
        step: The input's output in a final.
        request_id: Id of the input in vLLM's application.

    Raises:
        Exception: Another version of vLLM encoded the output, or it is damaged.
    """
    output = decode_output(step.parts, request_id)
    output.finish_reason = EngineFinish.STOP
    return output
