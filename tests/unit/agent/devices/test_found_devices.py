"""Devices of a machine, and the names by which settings select them."""

import sys

import pytest

from services.agent.devices.found import (
    Device,
    cuda_variables,
    named_devices,
    nvidia_devices,
    visible_devices,
)
from shared.contracts.errors import SettingsError
from tests.unit.agent.devices.fake_nvml import GIB, FakeGpu, FakeNvml

PART = FakeGpu("MIG-4f2b8a1c-01", "NVIDIA H200 MIG 3g.71gb", 70 * GIB)
MACHINE = FakeNvml(
    FakeGpu("GPU-0aaa"), FakeGpu("GPU-1bbb", parts=[PART, None]), FakeGpu("GPU-2ccc", has_mig=False)
)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, ...]:
    monkeypatch.setitem(sys.modules, "pynvml", MACHINE)
    return nvidia_devices()


def names(devices: tuple[Device, ...]) -> list[str]:
    return [each.name for each in devices]


def test_gpus_are_named_by_number_and_mig_instances_by_uuid(devices: tuple[Device, ...]):
    assert names(devices) == ["0", "MIG-4f2b8a1c-01", "2"]
    assert [each.label for each in devices] == ["GPU 0", "GPU 1 MIG-4f2b8a1c", "GPU 2"]
    assert [each.kind for each in devices] == ["H200", "H200 MIG 3g.71gb", "H200"]
    assert devices[1].memory_bytes == 70 * GIB


def test_a_machine_without_the_driver_has_no_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    assert nvidia_devices() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_devices() == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ["0", "MIG-4f2b8a1c-01", "2"]),
        ("2,0", ["2", "0"]),
        ("GPU-2", ["GPU-2ccc"]),
        ("1", ["MIG-4f2b8a1c-01"]),
        ("MIG-4f2b", ["MIG-4f2b8a1c-01"]),
        ("", []),
        ("-1", []),
    ],
)
def test_a_preset_variable_is_respected(
    devices: tuple[Device, ...], text: str | None, expected: list[str]
):
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert names(visible_devices(lambda: devices, environ)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,7", "--devices names '7', which is not one of the visible devices: 0, MIG-4f2b8a1c"),
        ("0,", "--devices names ''"),
        ("GPU-", "--devices names 'GPU-'"),
        ("0,GPU-0aaa", "--devices names GPU 0 twice"),
    ],
)
def test_a_wrong_name_is_refused_with_the_names_that_exist(
    devices: tuple[Device, ...], text: str, message: str
):
    with pytest.raises(SettingsError, match=message):
        named_devices(text, devices, source="--devices")


def test_a_process_gets_numbers_in_the_order_of_nvidia_smi(devices: tuple[Device, ...]):
    assert cuda_variables(devices[::2]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,2",
    }
    assert cuda_variables(()) == {}


def test_numbers_and_uuids_are_not_mixed(devices: tuple[Device, ...]):
    mixed = named_devices("GPU-0,2", devices, source="--devices")
    assert cuda_variables(mixed)["CUDA_VISIBLE_DEVICES"] == "GPU-0aaa,GPU-2ccc"
