"""Environment of engine hosts, whose agent may be in the process of a gateway."""

import os
from pathlib import Path

import pytest

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.process import host_environment
from services.engine_core import environment

DEVICE = "VLLM_TARGET_DEVICE"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has none of the variables before a test, and after it."""
    monkeypatch.setattr(environment, "_own", set())
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL", DEVICE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_an_engine_host_uses_the_device_that_a_gateway_in_the_process_does_not(tmp_path: Path):
    environment.use_no_device()

    assert os.environ[DEVICE] == "cpu"
    assert DEVICE not in host_environment(VllmSettings(), tmp_path)


def test_a_device_that_the_operator_has_set_counts_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(DEVICE, "cuda")
    environment.use_no_device()

    assert os.environ[DEVICE] == "cuda"
    assert host_environment(VllmSettings(), tmp_path)[DEVICE] == "cuda"


def test_an_engine_sees_the_devices_of_its_agent_and_not_those_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    settings = VllmSettings(environment={"CUDA_VISIBLE_DEVICES": "2,3"})

    assert host_environment(settings, tmp_path)["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_host_for_servers_of_others_needs_no_device(tmp_path: Path):
    variables = host_environment(VllmSettings(), tmp_path, environment.WITHOUT_DEVICE)

    assert variables[DEVICE] == "cpu"
