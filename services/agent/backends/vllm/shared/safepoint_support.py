"""Determines which engines can have safepoints; imports no vLLM."""

from typing import Any


def safepoint_refusal(config: Any) -> str | None:
    """
    Why an engine of this `VllmConfig` cannot preempt inside a forward pass; None if it can.

    Untested configurations count as unsupported.
    """
    parallel, scheduler = config.parallel_config, config.scheduler_config
    model = config.model_config
    reasons = {
        "asynchronous scheduling, which uses results of an iteration before it is over": (
            scheduler.async_scheduling
        ),
        "tensor parallelism, whose ranks would have to stop at the same layer": (
            parallel.tensor_parallel_size > 1
        ),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "compiled models and captured graphs, which pass no safepoint (set eager)": (
            not model.enforce_eager
        ),
        "vLLM's model runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)": config.use_v2_model_runner,
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "multimodal models": model.is_multimodal_model,
        "recurrent and hybrid models": model.is_hybrid or model.has_inner_state,
        "encoder-decoder models": model.is_encoder_decoder,
    }
    reason = next((name for name, applies in reasons.items() if applies), None)
    if reason is None:
        return None
    return (
        f"layer-wise preemption does not work with {reason}; "
        "set engine.vllm.safepoint_layers to 0 to serve without it"
    )


def safepoint_places(num_layers: int, every: int) -> range:
    """
    Indices of layers that have a safepoint before them: the first layer, and every *every*-th after
    it.

    A model with too few layers gets one safepoint in its middle.
    """
    return range(0, num_layers, max(1, min(every, -(-num_layers // 2))))
