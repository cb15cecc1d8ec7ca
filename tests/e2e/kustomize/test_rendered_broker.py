"""RabbitMQ 4 reads the rendered configuration, and the commands of its pods succeed."""

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.broker import PrivateNode
from tests.brokers import FOUR, release_of
from tests.unit.ops.kustomize.broker_configuration import BROKER, CLUSTER, SINGLE
from tests.unit.ops.kustomize.manifests import Container, Manifests, deployable, kubectl, render

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]
PEERS = "cluster_formation.classic_config."
"""Settings that name peers, which the only node here would wait for."""
COMMAND_S = 200.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    kubectl()
    tree, _ = deployable(tmp_path_factory.mktemp("kustomize"))
    return render(tree / "overlays" / "rabbitmq-cluster")


@pytest.fixture(scope="module")
def secret(cluster: Manifests) -> dict[str, str]:
    """Files of the secret that the pods of the broker mount."""
    volume = cluster.pod(BROKER).volumes["definitions"]
    return cluster.data("Secret", volume["secret"]["secretName"])


@pytest.fixture(scope="module")
def node(secret: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """A node with both configuration files; it does not start if it does not know a setting."""
    directory = tmp_path_factory.mktemp("rabbitmq-4")
    definitions = directory / "definitions.json"
    definitions.write_text(secret["definitions.json"])
    known = {key: value for key, value in CLUSTER.items() if not key.startswith(PEERS)}
    settings = SINGLE | known | {"load_definitions": str(definitions)}
    node = PrivateNode(directory, release=release_of(FOUR), settings=settings)
    node.start()
    yield node
    node.close()


def run(node: PrivateNode, command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command of a pod as if in the pod of *node*."""
    release = release_of(FOUR)
    # White box: a pod has the variables of its node, of which only `ctl` is public.
    environment = node._env()
    environment["PATH"] = os.pathsep.join((str(release.programs), environment["PATH"]))
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )


def test_the_configuration_is_in_force(node: PrivateNode):
    values = {
        name: node.ctl("eval", f"application:get_env({name}).").strip()
        for name in (
            "rabbit, cluster_partition_handling",
            "rabbit, quorum_membership_reconciliation_enabled",
            "rabbit, quorum_membership_reconciliation_target_group_size",
            "aten, poll_interval",
            "kernel, net_ticktime",
        )
    }

    assert list(values.values()) == [
        "{ok,pause_minority}",
        "{ok,true}",
        "{ok,3}",
        "{ok,1000}",
        "{ok,8}",
    ]


def test_definitions_are_loaded(node: PrivateNode, secret: dict[str, str]):
    expected = {user["name"] for user in json.loads(secret["definitions.json"])["users"]}
    listed = node.ctl("list_users", "--no-table-headers").splitlines()

    assert {line.split()[0] for line in listed} == expected


def test_the_liveness_probe_succeeds(node: PrivateNode, cluster: Manifests):
    probe = cluster.pod(BROKER).main.spec["livenessProbe"]["exec"]["command"]
    done = run(node, probe)

    assert done.returncode == 0, done.stderr


def test_a_node_prepares_its_end(node: PrivateNode, cluster: Manifests):
    """The last test of this node: it takes no connections afterwards."""
    hook = cluster.pod(BROKER).main.spec["lifecycle"]["preStop"]["exec"]["command"]
    done = run(node, hook)

    assert done.returncode == 0, done.stdout + done.stderr
    assert not node.running


def test_the_cookie_is_readable_by_its_owner_alone(
    cluster: Manifests, secret: dict[str, str], tmp_path: Path
):
    (container,) = [each for each in cluster.pod(BROKER).containers if each.is_init]
    there = {mount["mountPath"] for mount in container.spec["volumeMounts"]}
    definitions, data = tmp_path / "definitions", tmp_path / "data"
    definitions.mkdir()
    data.mkdir()
    (definitions / "erlang-cookie").write_text(secret["erlang-cookie"])
    (definitions / "erlang-cookie").chmod(0o440)
    assert there == {"/definitions", "/var/lib/rabbitmq"}
    subprocess.run(_here(container, definitions, data), check=True)

    cookie = data / ".erlang.cookie"
    assert cookie.read_text() == secret["erlang-cookie"]
    assert stat.S_IMODE(cookie.stat().st_mode) == 0o600


def _here(container: Container, definitions: Path, data: Path) -> list[str]:
    """The command of a container with the paths of this machine."""
    return [
        word.replace("/definitions", str(definitions)).replace("/var/lib/rabbitmq", str(data))
        for word in container.spec["command"]
    ]
