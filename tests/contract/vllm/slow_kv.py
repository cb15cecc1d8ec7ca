"""A KV connector for vLLM that loads slowly; imports vLLM."""

import time
from collections.abc import Sequence
from typing import Any

from services.agent.backends.vllm.kv.connector import HostKvConnector
from services.agent.backends.vllm.kv.store import HostStore, LayerBlocks
from services.agent.backends.vllm.kv.transfers import Transfer

LAYER_S = 0.05
"""Time to load each layer's copies."""


class SlowStore(HostStore):
    """Loads a layer's copies much more slowly than a tiny model computes the layer."""

    def _load_layer(self, layer: LayerBlocks, part: slice, transfers: Sequence[Transfer]) -> float:
        time.sleep(LAYER_S)
        return LAYER_S + super()._load_layer(layer, part, transfers)


class SlowConnector(HostKvConnector):
    """Connector that uses a `SlowStore` in the worker."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self._store is not None:
            self._store.__class__ = SlowStore
            self._store._at_once_bytes = 0
