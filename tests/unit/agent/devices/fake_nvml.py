"""A stand-in for the module `pynvml`, with GPUs that a test chooses."""

from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 1 << 30


class NVMLError(Exception):
    """Any error of the driver."""


@dataclass
class FakeGpu:
    uuid: str
    name: str = "NVIDIA H200"
    memory_bytes: int = 141 * GIB
    parts: list["FakeGpu | None"] = field(default_factory=list)
    """MIG instances; None is a place without one."""
    has_mig: bool = True


class FakeNvml:
    """The functions of `pynvml` that Headway calls."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *gpus: FakeGpu, driver: bool = True) -> None:
        self._gpus, self._driver = gpus, driver

    def nvmlInit(self) -> None:  # noqa: N802 - names of NVML
        if not self._driver:
            raise NVMLError

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, at: int) -> FakeGpu:  # noqa: N802
        return self._gpus[at]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        if not gpu.has_mig:
            raise NVMLError
        return [int(bool(gpu.parts)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:  # noqa: N802
        return len(gpu.parts)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, at: int) -> FakeGpu:  # noqa: N802
        part = gpu.parts[at]
        if part is None:
            raise NVMLError
        return part

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=gpu.memory_bytes)
