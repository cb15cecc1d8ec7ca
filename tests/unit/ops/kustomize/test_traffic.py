"""Network policies let through what the mesh needs, and nothing else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.ops.kustomize.manifests import Manifests, Pod, matches

MESH = (
    "headway-gateway",
    "headway-grouper",
    "headway-leader",
    "headway-estimator",
    "headway-agent",
)
BROKER = "headway-rabbitmq"


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod, or what is outside of the namespace."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] = field(default_factory=dict)
    """Labels of its namespace; none: it is not in the cluster."""
    ports: Mapping[str, int] = field(default_factory=dict)
    is_headway: bool = False


def namespace(name: str, **labels: str) -> dict[str, str]:
    return {"kubernetes.io/metadata.name": name} | labels


def end_of(pod: Pod) -> End:
    ports = {name: port for each in pod.containers for name, port in each.ports.items()}
    return End(pod.labels, namespace(pod.namespace), ports, is_headway=True)


OUTSIDE = End()
DNS = End({"k8s-app": "kube-dns"}, namespace("kube-system"))
PROMETHEUS = End({"app": "prometheus"}, namespace("monitoring"))
PRODUCER = End({"app": "shop"}, namespace("shop", **{"headway-amqp": "allowed"}))
STRANGER = End({"app": "blog"}, namespace("blog"))
SERVER = End({"app": "chat"}, namespace("models"), {"http": 8000})


def is_peer(peer: dict[str, Any], end: End, own: Mapping[str, str]) -> bool:
    """Whether a rule's peer is *end*; a peer without namespaces is in the policy's own."""
    if "namespaceSelector" in peer:
        if not end.namespace or not matches(peer["namespaceSelector"], end.namespace):
            return False
    elif end.namespace != own:
        return False
    return matches(peer.get("podSelector", {}), end.labels)


def passes(rule: dict[str, Any], key: str, peer: End, own: Mapping[str, str]) -> bool:
    """Whether a rule lets connections with *peer* through; one without peers is for all."""
    peers = rule.get(key, ())
    return not peers or any(is_peer(each, peer, own) for each in peers)


def allowed(manifests: Manifests, source: End, target: End, port: int) -> bool:
    """Whether the policies let *source* connect to a TCP *port* of *target*."""
    for end, direction, key, peer in (
        (source, "Egress", "to", target),
        (target, "Ingress", "from", source),
    ):
        policies = [
            each["spec"]
            for each in manifests.of("NetworkPolicy")
            if end.is_headway
            and direction in each["spec"]["policyTypes"]
            and matches(each["spec"]["podSelector"], end.labels)
        ]
        rules = [rule for each in policies for rule in each.get(direction.lower(), ())]
        if policies and not any(
            passes(rule, key, peer, end.namespace) and has_port(rule, target, port)
            for rule in rules
        ):
            return False
    return True


def has_port(rule: dict[str, Any], target: End, port: int) -> bool:
    """Whether a rule has the port, by its number or by its name at the target; or has no ports."""
    numbers = [target.ports.get(each["port"], each["port"]) for each in rule.get("ports", ())]
    return not numbers or port in numbers


def ends(manifests: Manifests) -> dict[str, End]:
    return {pod.name: end_of(pod) for pod in manifests.pods}


def test_services_reach_the_broker_and_nothing_else_of_the_mesh(manifests: Manifests):
    known = ends(manifests)
    reached = {
        (source, target, port)
        for source in MESH
        for target, end in known.items()
        for port in end.ports.values()
        if source != target and allowed(manifests, known[source], end, port)
    }

    assert reached == {(source, BROKER, 5672) for source in MESH}


def test_all_pods_find_names(manifests: Manifests):
    assert all(allowed(manifests, end, DNS, 53) for end in ends(manifests).values())


@pytest.mark.parametrize("client", [OUTSIDE, STRANGER], ids=["outside", "another namespace"])
def test_clients_reach_the_gateways_api_alone(manifests: Manifests, client: End):
    reached = {
        (target, port)
        for target, end in ends(manifests).items()
        for port in end.ports.values()
        if allowed(manifests, client, end, port)
    }

    assert reached == {("headway-gateway", 8000)}


def test_producers_reach_the_broker_from_namespaces_with_the_label(manifests: Manifests):
    broker = ends(manifests)[BROKER]

    assert allowed(manifests, PRODUCER, broker, 5672)
    assert not allowed(manifests, STRANGER, broker, 5672)
    assert not allowed(manifests, PRODUCER, broker, 25672)


def test_prometheus_scrapes_what_monitors_name(manifests: Manifests):
    for monitor in manifests.of("PodMonitor"):
        ports = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]}
        for end in ends(manifests).values():
            scraped = [end.ports[name] for name in ports & end.ports.keys()]

            assert all(allowed(manifests, PROMETHEUS, end, port) for port in scraped)


def test_nodes_of_a_cluster_reach_each_other(overlay: Callable[[str], Manifests]):
    cluster = overlay("rabbitmq-cluster")
    broker = ends(cluster)[BROKER]

    assert all(allowed(cluster, broker, broker, port) for port in (4369, 25672))


def test_only_agents_reach_attached_servers(overlay: Callable[[str], Manifests]):
    attach = overlay("attach")
    reaching = {name for name, end in ends(attach).items() if allowed(attach, end, SERVER, 8000)}

    assert reaching == {"headway-agent"}


def test_only_gateways_and_groupers_reach_the_database(overlay: Callable[[str], Manifests]):
    own = overlay("own")
    reaching = {name for name, end in ends(own).items() if allowed(own, end, End(), 5432)}

    assert reaching == {"headway-gateway", "headway-grouper"}
