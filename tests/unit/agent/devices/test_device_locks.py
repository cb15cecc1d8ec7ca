"""An agent's devices, which no other agent can take."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.agent.cli import CLI
from services.agent.devices.found import Device
from services.agent.devices.locks import taken
from services.agent.devices.own import engine_settings, own_devices
from services.agent.service import check
from services.agent.settings import Settings
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry

DEVICES = tuple(Device(str(at), at, f"GPU-{at}", "H200", 141 << 30) for at in range(4))
HOLD = """
import sys
from pathlib import Path
from services.agent.devices.found import Device
from services.agent.devices.locks import taken
with taken([Device("2", 2, "GPU-2", "H200", 1)], "agent-7", Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def settings(**fields: Any) -> Settings:
    return msgspec.convert({"instance_id": "agent-1"} | fields, Settings)


def entry(name: str, **arguments: int) -> ModelEntry:
    return ModelEntry(name=ModelName(name), max_model_len=64, engine_args=arguments)


def test_a_device_that_another_agent_has_is_refused_by_name(tmp_path: Path):
    with taken(DEVICES[:2], "agent-0", tmp_path):
        with (
            pytest.raises(
                SettingsError, match=rf"GPU 1 is taken by agent-0 \(process {os.getpid()}\)"
            ),
            taken(DEVICES[1:], "agent-1", tmp_path),
        ):
            pass
        with taken(DEVICES[2:], "agent-1", tmp_path):
            pass
    with taken(DEVICES, "agent-1", tmp_path):
        pass


def test_a_killed_process_frees_its_devices(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(SettingsError, match="GPU 2 is taken by agent-7"),
            taken(DEVICES[2:3], "agent-1", tmp_path),
        ):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with taken(DEVICES[2:3], "agent-1", tmp_path):
        pass


def test_lock_files_are_for_all_users_and_follow_no_links(tmp_path: Path):
    folder = tmp_path / "locks"
    with taken(DEVICES[:1], "agent-0", folder):
        assert (folder / "GPU-0.lock").stat().st_mode & 0o777 == 0o666
    (folder / "GPU-1.lock").symlink_to(tmp_path / "other")
    with (
        pytest.raises(SettingsError, match="cannot open the lock of a device"),
        taken(DEVICES[1:2], "agent-0", folder),
    ):
        pass


def test_the_option_of_run_is_the_setting_devices(monkeypatch: pytest.MonkeyPatch):
    seen: list[Settings] = []
    monkeypatch.setattr(
        "shared.runtime.cli.ServiceCli.serve", lambda _, *, settings: seen.append(settings) or 0
    )
    assert CLI.main(["run", "--devices", "0,1", "--set", "instance_id=a"]) == 0
    assert seen[0].devices == "0,1"


def test_engines_see_the_devices_of_their_agent_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = settings(devices="1,3", engine={"vllm": {"environment": {"NCCL_DEBUG": "WARN"}}})
    own = own_devices(given, (), lambda: DEVICES)
    assert engine_settings(given, own).vllm.environment == {
        "NCCL_DEBUG": "WARN",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1,3",
    }
    assert engine_settings(settings(), ()) == settings().engine


def test_devices_that_are_missing_or_too_few_are_refused():
    with pytest.raises(SettingsError, match="this process sees no NVIDIA GPU"):
        own_devices(settings(devices="0"), (), tuple)
    with pytest.raises(SettingsError, match="model wide needs 2 devices"):
        own_devices(settings(devices="0"), [entry("wide", tensor_parallel_size=2)], lambda: DEVICES)
    with pytest.raises(SettingsError, match="devices are of no use"):
        check(settings(devices="0", models=["m"], engine={"backend": "remote"}))
