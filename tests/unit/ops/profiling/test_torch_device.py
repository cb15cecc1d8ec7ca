"""Finding a device, and measuring time on it; CUDA is faked."""

from types import SimpleNamespace

import pytest

from shared.contracts.errors import SettingsError
from tests import requirements

torch = requirements.Late("torch")
torch_device = requirements.Late("ops.profiling.torch_device")


class PlayedCuda:
    """Fake of two GPUs that take 7 ms for every call and record the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reported: list[str] = []
        properties = SimpleNamespace(L2_cache_size=50 << 20)
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "get_device_name": lambda device: f"GPU {device.index}",
            "get_device_properties": lambda _: properties,
            "mem_get_info": lambda _: (70 << 30, 80 << 30),
            "synchronize": lambda: self.reported.append("synchronize"),
            "Event": self.event,
            "device": self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def __call__(self, device):
        self.reported.append(f"on {device}")
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reported.append("left")

    def event(self, *, enable_timing: bool):
        assert enable_timing
        return SimpleNamespace(
            record=lambda: self.reported.append("record"), elapsed_time=lambda _: 7.0
        )


def test_gpu_is_timed_by_events_after_earlier_work_is_done(monkeypatch: pytest.MonkeyPatch):
    cuda = PlayedCuda(monkeypatch)
    device = torch_device.find_device("cuda:1")

    assert (device.name, device.cache_bytes, device.free_bytes) == ("GPU 1", 50 << 20, 70 << 30)
    assert device.time_s(lambda: cuda.reported.append("run")) == pytest.approx(0.007)
    order = ["on cuda:1", "synchronize", "record", "run", "record", "synchronize", "left"]
    assert cuda.reported == order


def test_cuda_without_a_number_is_the_first_device(monkeypatch: pytest.MonkeyPatch):
    PlayedCuda(monkeypatch)
    assert torch_device.find_device("cuda").name == "GPU 0"


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    PlayedCuda(monkeypatch)
    with pytest.raises(SettingsError, match="cuda:2 does not exist: use cuda:0 to cuda:1"):
        torch_device.find_device("cuda:2")


def test_missing_cuda_error_names_the_remedies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"no CUDA device; .* --device cpu for a trial"):
        torch_device.find_device("cuda")


@pytest.mark.parametrize("name", ["mps", "cuda:", "cuda:x", "cpu:0", ""])
def test_unknown_device_name_is_refused(name: str):
    with pytest.raises(SettingsError, match="must be one of cpu, cuda, cuda:N"):
        torch_device.find_device(name)


def test_cpu_is_timed_by_the_clock():
    device = torch_device.find_device("cpu")
    ran: list[int] = []

    assert device.time_s(lambda: ran.append(1)) > 0
    assert (device.name, ran) == ("cpu", [1])
    assert device.free_bytes > 1 << 20
