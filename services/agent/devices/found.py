"""The NVIDIA GPUs of this machine, and the names by which CUDA selects them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

import msgspec

from shared.contracts.errors import SettingsError

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable with the devices that a process may use, e.g. `0,2` or `GPU-5c8a…`."""
NO_DEVICE = ("", "-1", "none", "NoDevFiles")
"""Values of the variable with which a process has no device."""
_PART = "MIG-"


class Device(msgspec.Struct, frozen=True):
    """A GPU, or a MIG instance of a GPU."""

    name: str
    """Name for CUDA: the number of a GPU, or a UUID."""
    number: int
    """Number of the GPU in `nvidia-smi`."""
    uuid: str
    kind: str
    memory_bytes: int

    @property
    def is_part(self) -> bool:
        """True for a MIG instance, which cannot serve a model together with others."""
        return self.uuid.startswith(_PART)

    @property
    def label(self) -> str:
        """Name for operators."""
        return f"GPU {self.number}" + (f" {self.uuid[:12]}" if self.is_part else "")


Provider = Callable[[], tuple[Device, ...]]
"""Returns the devices of this machine."""


def nvidia_devices() -> tuple[Device, ...]:
    """GPUs and MIG instances that NVIDIA's driver lists; none without the driver."""
    try:
        import pynvml  # noqa: PLC0415 - only where devices are used
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(
            device
            for number in range(pynvml.nvmlDeviceGetCount())
            for device in _devices_of(pynvml, number)
        )
    finally:
        pynvml.nvmlShutdown()


def _devices_of(pynvml: ModuleType, number: int) -> Iterator[Device]:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
    try:
        has_parts = pynvml.nvmlDeviceGetMigMode(gpu)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # the GPU cannot be divided
        has_parts = False
    if not has_parts:
        yield _device(pynvml, gpu, number)
        return
    for at in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, at)
        except pynvml.NVMLError:  # there is no instance at this place
            continue
        yield _device(pynvml, part, number)


def _device(pynvml: ModuleType, handle: object, number: int) -> Device:
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    return Device(
        name=uuid if uuid.startswith(_PART) else str(number),
        number=number,
        uuid=uuid,
        kind=pynvml.nvmlDeviceGetName(handle).removeprefix("NVIDIA "),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    )


def visible_devices(provider: Provider, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """
    The devices that this process may use, in the order of `CUDA_VISIBLE_DEVICES` if it is set.

    Numbers are those of `nvidia-smi`.

    Raises:
        SettingsError: The variable names a device that does not exist.
    """
    text = environ.get(VISIBLE)
    if text is None:
        return provider()
    return () if text.strip() in NO_DEVICE else named_devices(text, provider(), source=VISIBLE)


def named_devices(text: str, devices: Sequence[Device], *, source: str) -> tuple[Device, ...]:
    """
    The devices that *text* names with commas: numbers of `nvidia-smi`, or UUIDs or their beginning.

    The number of a GPU with MIG instances stands for all of them.

    Args:
        text: Value of the setting.
        devices: Devices that it may name.
        source: Name of the setting.

    Raises:
        SettingsError: A device is not among them, or is named twice.
    """
    found: list[Device] = []
    for token in (each.strip() for each in text.split(",")):
        known = _of_token(token, devices)
        if not known:
            names = ", ".join(each.name for each in devices) or "none"
            raise SettingsError(
                f"{source} names {token!r}, which is not one of the visible devices: {names}"
            )
        for device in known:
            if any(device.uuid == each.uuid for each in found):
                raise SettingsError(f"{source} names {device.label} twice")
            found.append(device)
    return tuple(found)


def _of_token(token: str, devices: Sequence[Device]) -> list[Device]:
    if token.isdigit():
        return [each for each in devices if each.number == int(token)]
    begun = [each for each in devices if token and each.uuid.startswith(token)]
    # CUDA reads the beginning of a UUID only if one device has it.
    return [msgspec.structs.replace(begun[0], name=begun[0].uuid)] if len(begun) == 1 else []


def cuda_variables(devices: Sequence[Device]) -> dict[str, str]:
    """Variables with which a process uses *devices* only; none if there are no devices."""
    if not devices:
        return {}
    # CUDA's own order of numbers is by speed, that of `nvidia-smi` by the place on the bus.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return order | {VISIBLE: names_of(devices)}


def names_of(devices: Sequence[Device]) -> str:
    """Names of *devices* for CUDA, which takes either numbers or UUIDs."""
    are_numbers = all(device.name.isdigit() for device in devices)
    return ",".join(device.name if are_numbers else device.uuid for device in devices)
