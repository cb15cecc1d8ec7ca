"""`python -m services.mesh.models.provide`: writes the registry of a mesh of containers."""

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from services.mesh.attached import API_KEY, attached
from services.mesh.models.sources import entry_of, parse_named
from shared.contracts.errors import MeshError, SettingsError
from shared.contracts.models import ModelEntry
from shared.models.files.model_files import ModelFiles, require_weights
from shared.models.registry import write_registry
from shared.models.tiny import make_tiny_models
from shared.runtime.lifecycle import EXIT_OK
from shared.runtime.options import Folder
from shared.runtime.program import Program, verb

REGISTRY = "registry.json"
AGENT = "attached.json"
"""Settings file of the agent of an attached server."""
MARKER = ".provided"
"""File beside a registry that this program has written."""
COPIED_BYTES = 64 << 20
"""Larger files of a mounted model, which are weights, are links to the mount."""


def provide(
    *,
    directory: Annotated[Folder, Parameter(name="--dir")],
    model: Annotated[str, Parameter(metavar="DIR_OR_ID[=NAME]")] = "",
    mounted: Folder = Path("/model"),
    attach: Annotated[str, Parameter(metavar="[NAME=]URL[#MODEL]")] = "",
    weights: bool = False,
) -> int:
    """
    Write the registry of a mesh of containers.

    The registry has one model (--model), the model of an attached server (--attach), or tiny models
    (neither). A registry that this program has not written is kept.

    Args:
        directory: Directory of the registry, which all services mount.
        model: Directory or hub id of one model, and its name.
        mounted: Where the directory of the model is mounted, if the model is a directory.
        attach: Server to attach, as for `headway up --attach`.
        weights: Make tiny models with weights, which only simulated engines do not need.

    Raises:
        SettingsError: The model or the server cannot be used; the message says why.
    """
    registry, marker = directory / REGISTRY, directory / MARKER
    if registry.exists() and not marker.exists():
        return _say(f"{registry} is the user's own, and is kept")
    if model and attach:
        raise SettingsError("give a model or a server to attach, not both")
    # Before the registry, so that a process that is killed in between leaves no foreign registry.
    marker.touch()
    if model:
        entry = _entry(directory, model, mounted)
    elif attach:
        entry = asyncio.run(attach_server(directory, attach))
    else:
        return _say(f"tiny models in {make_tiny_models(directory, weights=weights)}")
    _write(registry, entry)
    return _say(f"{entry.name} in {registry}")


def _write(registry: Path, entry: ModelEntry) -> None:
    """Replace the registry as a whole, since running services follow it."""
    draft = registry.with_suffix(".draft")
    write_registry(draft, [entry])
    draft.replace(registry)


def _entry(directory: Path, text: str, mounted: Path) -> ModelEntry:
    """
    Entry of the model `SOURCE` or `SOURCE=NAME`: of the mounted directory if it has a model, else
    of the hub.
    """
    if not (mounted / "config.json").is_file():
        if text.startswith((".", "/", "~")):
            raise SettingsError(
                f"the directory {text} is not a model: config.json is missing; give the directory "
                "of a model in the format of Hugging Face, or an id org/name of the hub"
            )
        entry = entry_of(text, directory)
    else:
        source, name = parse_named(text)
        name = name or Path(source.rstrip("/")).name
        entry = entry_of(f"{_copy(mounted, directory / 'given' / name)}={name}", directory)
    require_weights(ModelFiles(Path(entry.path)))
    return entry


def _copy(mounted: Path, target: Path) -> Path:
    """
    Copy a mounted model without its weights, so that a service without the mount can read the
    tokenizer.

    Raises:
        SettingsError: This user may not read a file of the model.
    """

    def copy(source: str, made: str) -> str:
        if Path(source).stat().st_size > COPIED_BYTES:
            Path(made).symlink_to(source)
            return made
        return str(shutil.copyfile(source, made))

    unreadable = [str(each) for each in mounted.rglob("*") if not os.access(each, os.R_OK)]
    if unreadable:
        raise SettingsError(
            f"user {os.getuid()} of this container may not read {', '.join(sorted(unreadable))}; "
            "run `chmod -R a+rX` on the directory of the model"
        )
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(mounted, target, copy_function=copy)
    return target


async def attach_server(directory: Path, text: str) -> ModelEntry:
    """Entry of the server's model; writes the settings of the agent that attaches it."""
    key = os.environ.get(API_KEY) or None
    (entry,), (agent,) = await attached([text], known=None, api_key=key)
    settings = msgspec.json.decode(msgspec.json.encode(agent.values()))
    # The agent has its own name, and the key, from its environment.
    del settings["instance_id"]
    settings["engine"]["remote"].pop("api_key", None)
    (directory / AGENT).write_bytes(msgspec.json.encode(settings))
    return entry


def _say(text: str) -> int:
    sys.stdout.write(f"models: {text}\n")
    return EXIT_OK


PROGRAM = Program(
    verb("python -m services.mesh.models.provide", provide),
    failures=(MeshError, OSError, ImportError),
)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
