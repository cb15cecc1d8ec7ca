"""A private node whose broker does not start."""

import json
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
