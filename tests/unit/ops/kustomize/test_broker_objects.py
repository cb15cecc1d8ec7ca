"""The configuration of the broker fits its pods."""

import re
from collections.abc import Callable

import pytest

from tests.unit.ops.kustomize.broker_configuration import BROKER, CLUSTER, SINGLE
from tests.unit.ops.kustomize.manifests import Manifests

MIB = 2**20


def test_configuration_files_are_read_in_their_order(manifests: Manifests):
    """The image reads the files of /etc/rabbitmq/conf.d in the order of their names."""
    mounts = manifests.pod(BROKER).main.spec["volumeMounts"]
    files = {
        mount["subPath"]: mount["mountPath"] for mount in mounts if mount["name"] == "configuration"
    }

    assert files["rabbitmq.conf"] == "/etc/rabbitmq/conf.d/20-headway.conf"
    assert files.get("cluster.conf", "/etc/rabbitmq/conf.d/30-cluster.conf") > min(files.values())


def test_definitions_are_where_the_configuration_says(manifests: Manifests):
    broker = manifests.pod(BROKER)
    mounts = {mount["name"]: mount["mountPath"] for mount in broker.main.spec["volumeMounts"]}
    secret = broker.volumes["definitions"]["secret"]

    assert SINGLE["load_definitions"] == f"{mounts['definitions']}/definitions.json"
    assert "definitions.json" in manifests.data("Secret", secret["secretName"])
    assert secret["defaultMode"] == 0o440


def test_publishers_wait_before_the_container_is_killed_for_its_memory(manifests: Manifests):
    limit = manifests.pod(BROKER).main.spec["resources"]["limits"]["memory"]
    watermark = int(SINGLE["vm_memory_high_watermark.absolute"].removesuffix("MiB")) * MIB

    assert limit == "2Gi"
    assert watermark < 0.7 * 2048 * MIB


def test_peers_of_a_cluster_are_the_names_of_its_pods(overlay: Callable[[str], Manifests]):
    cluster = overlay("rabbitmq-cluster")
    broker = cluster.pod(BROKER)
    names = {
        cluster.environment(broker.main, pod_name=f"{BROKER}-{number}")["RABBITMQ_NODENAME"]
        for number in range(broker.replicas)
    }
    peers = {value for key, value in CLUSTER.items() if ".classic_config.nodes." in key}

    assert names == peers
    domains = {name.partition(".")[2] for name in names}
    assert domains == {broker.owner["spec"]["serviceName"]}
    assert CLUSTER["cluster_formation.target_cluster_size_hint"] == str(broker.replicas)


def test_node_names_with_a_domain_are_long_names(manifests: Manifests):
    environment = manifests.environment(manifests.pod(BROKER).main)

    assert re.fullmatch(r"rabbit@[\w-]+\.[\w-]+", environment["RABBITMQ_NODENAME"])
    assert environment["RABBITMQ_USE_LONGNAME"] == "true"


def test_a_node_that_lost_the_majority_pauses(overlay: Callable[[str], Manifests]):
    """With `ignore`, a cluster stays split after the network has healed."""
    assert CLUSTER["cluster_partition_handling"] == "pause_minority"
    assert overlay("one-node").pod(BROKER).replicas == 1


@pytest.mark.parametrize("name", ["rabbitmq-cluster", "keda"])
def test_nodes_are_on_different_machines(overlay: Callable[[str], Manifests], name: str):
    broker = overlay(name).pod(BROKER)
    anti = broker.spec["affinity"]["podAntiAffinity"]
    (term,) = anti["requiredDuringSchedulingIgnoredDuringExecution"]

    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert broker.replicas == 3


def test_the_startup_probe_waits_for_peers_for_longer_than_the_node_does(manifests: Manifests):
    """A node with data waits for its peers in ten attempts of 30 s."""
    probe = manifests.pod(BROKER).main.spec["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] > 10 * 30
