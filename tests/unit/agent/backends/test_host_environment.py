"""Environment of engine hosts."""

from pathlib import Path

import pytest

from services.agent.backends.remote.token_host import WITHOUT_DEVICE
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.process import host_environment

DEVICE = "VLLM_TARGET_DEVICE"


def test_a_device_that_the_operator_has_set_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DEVICE, "cuda")

    assert host_environment(VllmSettings(), tmp_path)[DEVICE] == "cuda"


def test_an_engine_sees_the_devices_of_its_agent_and_not_those_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    settings = VllmSettings(environment={"CUDA_VISIBLE_DEVICES": "2,3"})

    assert host_environment(settings, tmp_path)["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_host_for_servers_of_others_needs_no_device(tmp_path: Path):
    variables = host_environment(VllmSettings(), tmp_path, WITHOUT_DEVICE)

    assert variables[DEVICE] == "cpu"
