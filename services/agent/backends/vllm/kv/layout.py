"""vLLM's layout of KV, and the configurations for which checkpoints are not supported."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from services.agent.backends.vllm.kv.store import LayerBlocks


def obstacle(vllm_config: Any, kv_cache_config: Any, host_kv_bytes: int) -> str | None:
    """Return why checkpoints are not possible; None if they are."""
    if not current_platform.is_cpu():
        return "a GPU needs vLLM's own offloader, `kv_offloading_size` among `engine_args`"
    if vllm_config.parallel_config.world_size > 1:
        return "the model is spread over several workers"
    if vllm_config.speculative_config is not None:
        return "speculative decoding writes KV that may be discarded"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return "only models with full attention in all layers keep all KV in blocks"
    size = block_bytes(kv_cache_config)
    if host_kv_bytes < size:
        return f"{host_kv_bytes} bytes do not hold one block of {size} bytes"
    return None


def block_bytes(kv_cache_config: Any) -> int:
    """Size of one block in bytes, over all layers."""
    (group,) = kv_cache_config.kv_cache_groups
    num_layers = sum(len(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors)
    return int(group.kv_cache_spec.page_size_bytes * num_layers)


def layers_of(kv_caches: Mapping[str, torch.Tensor], size: int) -> dict[str, LayerBlocks]:
    """
    Bytes of each layer's KV by layer name, without layers that share the KV of an earlier layer.

    Args:
        kv_caches: KV tensors by layer name, with one row for each block.
        size: Size of one block in bytes, over all layers.

    Raises:
        ValueError: A block's bytes are not contiguous, or a block does not have *size* bytes.
    """
    layers: dict[str, LayerBlocks] = {}
    seen: set[int] = set()
    for name, tensor in kv_caches.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            layers[name] = _blocks_of(tensor)
    if size != sum(layer.shape[1] for layer in layers.values()):
        raise ValueError(f"KV blocks do not take {size} bytes")
    return layers


def _blocks_of(tensor: torch.Tensor) -> LayerBlocks:
    num_blocks, stride = tensor.shape[0], tensor.stride(0)
    block = tensor[0]
    span = 1 + sum(
        (size - 1) * step for size, step in zip(block.shape, block.stride(), strict=True)
    )
    if span != block.numel() or stride < span:
        raise ValueError(f"KV of shape {tuple(tensor.shape)} has strides {tensor.stride()}")
    flat = tensor.as_strided((num_blocks, block.numel()), (stride, 1))
    array: LayerBlocks = flat.view(torch.uint8).numpy()
    return array
