"""A mesh in one process over any broker."""

from contextlib import AbstractAsyncContextManager

from services.mesh.embedded import EmbeddedMesh
from services.mesh.spec import MeshSpec
from shared.broker.connect import open_broker
from shared.broker.protocol import Broker


class BrokerMesh(EmbeddedMesh):
    """
    A mesh in one process over any broker.

    Args:
        spec: The services.
        url: RabbitMQ; None: the in-process broker.
    """

    def __init__(self, spec: MeshSpec, url: str | None) -> None:
        super().__init__(spec)
        self._url = url

    def open_broker(self, client_name: str) -> AbstractAsyncContextManager[Broker]:
        if self._url is None:
            return super().open_broker(client_name)
        return open_broker(self._url, client_name=client_name)
