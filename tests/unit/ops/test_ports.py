"""`ops.ports`: free ports for servers of tests, benches and the demo."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ops.ports import free_port

_PRINT_PORTS = "from ops.ports import free_ports; print(*free_ports(100))"


def test_processes_get_different_ports_although_none_listens_yet() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", _PRINT_PORTS], stdout=subprocess.PIPE) as one,
        subprocess.Popen([sys.executable, "-c", _PRINT_PORTS], stdout=subprocess.PIPE) as other,
    ):
        printed = [process.communicate()[0].split() for process in (one, other)]
    assert [len(ports) for ports in printed] == [100, 100]
    assert len({*printed[0], *printed[1]}) == 200


def test_a_port_in_use_is_not_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = free_port()
    latest = tmp_path / "latest"
    latest.write_text(str(in_use - 1))
    monkeypatch.setattr("ops.ports._LATEST", latest)
    with socket.create_server(("127.0.0.1", in_use)):
        assert in_use < free_port()
    latest.write_text(str(in_use - 1))
    assert in_use == free_port()
