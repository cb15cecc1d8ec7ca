"""A KV connector for vLLM that loses copies; imports vLLM."""

from services.agent.backends.vllm.kv.connector import HostKvConnector, HostKvMetadata


class FaultyConnector(HostKvConnector):
    """A store that deliberately drops every third copy."""

    def handle_preemptions(self, kv_connector_metadata: HostKvMetadata) -> None:
        if self._store is not None:
            self._store._filled[::3] = False
        super().handle_preemptions(kv_connector_metadata)
