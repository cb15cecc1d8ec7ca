"""A private node: what it ends, and what it does not."""

import json
import subprocess
from pathlib import Path

import pytest

from ops.broker import PrivateNode
from ops.releases import Release
from shared.contracts.errors import BrokerUnavailableError

PROGRAMS = {"rabbitmq-server": "exit 1", "epmd": "exec sleep 60"}


def test_a_node_that_does_not_start_leaves_no_port_mapper(tmp_path: Path):
    for name, script in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    node = PrivateNode(tmp_path / "node", release=Release(programs=tmp_path))

    with pytest.raises(BrokerUnavailableError, match="did not start"):
        node.start()

    assert len(node._children) == 2
    assert all(child.poll() is not None for child in node._children.values())
    assert json.loads((tmp_path / "node" / "node.json").read_text())["pids"] == {}


def test_processes_that_have_the_ids_of_a_node_after_a_reboot_are_not_ended(tmp_path: Path):
    with subprocess.Popen(["sleep", "60"]) as other:
        ids = {"server": other.pid, "epmd": other.pid}
        state = {"port": 1, "dist_port": 2, "epmd_port": 3, "boot": "another", "pids": ids}
        (tmp_path / "node.json").write_text(json.dumps(state))
        (tmp_path / "rabbitmq.pid").write_text(str(other.pid))

        PrivateNode(tmp_path).close()

        assert other.poll() is None
        other.kill()
