"""Configuration of the broker in the manifests."""

from tests.unit.ops.kustomize.manifests import KUBERNETES

BROKER = "headway-rabbitmq"
"""Name of the objects of the broker."""


def configuration(path: str) -> dict[str, str]:
    """Keys and values of a configuration file of the broker."""
    lines = (KUBERNETES / path).read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, _, value in pairs}


SINGLE = configuration("rabbitmq/rabbitmq.conf")
CLUSTER = configuration("overlays/rabbitmq-cluster/cluster.conf")
