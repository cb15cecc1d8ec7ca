"""`headway models`: the models of a registry file."""

import math
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.table import Table

from services.mesh.models.checks import Memory, check_model, detected_memory, parse_memory
from services.mesh.models.sources import entry_of, parse_adapter, parse_engine_args
from services.mesh.verbs.options import file_of
from services.mesh.verbs.tables import add_columns, print_tables
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry, ModelTask, TrafficSplit
from shared.models.files.model_files import ModelFiles, require_weights
from shared.models.registry import ModelRegistry, RegistryFile, decode_registry, read_registry
from shared.models.registry_edit import registry_edit
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import File, JsonOption, Positive, whole
from shared.runtime.program import commands

MODELS = commands(
    "models",
    "Add, list, check and remove models of a registry file.",
    examples="""\
All services of a mesh read the registry file and follow its changes: an added
model is served within seconds, and the requests of a removed model are still
answered.

examples:
  headway models add ./Llama-3-8B                   a directory; its name is
                                                    the model's name
  headway models add Qwen/Qwen2.5-7B-Instruct=qwen  an id of the Hugging Face
                                                    hub
  headway models add --adapter qwen=./sql=qwen-sql  a LoRA adapter of `qwen`
  headway models check --memory 24GiB               what fits into 24 GiB
  headway models split chat qwen=95 qwen-new=5      5 % of the requests for
                                                    `chat` try qwen-new
  headway models remove qwen-sql

exit codes: 0 ok, 1 `check` found a problem, 2 usage or an unusable model""",
)
Registry = Annotated[
    File | None, Parameter(name="--registry", help="The registry file; default: HEADWAY_REGISTRY.")
]


@MODELS.command
def add(
    models: Annotated[tuple[str, ...], Parameter(name="MODEL[=NAME]")] = (),
    /,
    *,
    adapters: Annotated[
        tuple[str, ...], Parameter(name="--adapter", metavar="BASE=DIR[=NAME]")
    ] = (),
    max_model_len: Annotated[Positive | None, Parameter(metavar="TOKENS")] = None,
    max_adapters: Annotated[int, whole(least=0)] = 0,
    task: ModelTask | None = None,
    engine_args: Annotated[
        tuple[str, ...], Parameter(name="--engine-arg", metavar="NAME=VALUE")
    ] = (),
    registry: Registry = None,
    json: JsonOption = False,
) -> int:
    """
    Add models from their own files; creates the registry file if necessary.

    Args:
        models: Directory of a model, or an id org/name[@revision] of the Hugging Face hub, which is
            downloaded; NAME is the name in requests.
        adapters: Add the LoRA adapter in DIR to the model BASE; NAME is the name in requests; may
            be repeated.
        max_model_len: Limit of prompt plus answer, if it is less than the model's own.
        max_adapters: Room for N LoRA adapters in engines of each MODEL, for adapters that are added
            later.
        task: Task of each MODEL whose files do not determine it, e.g. embed for a decoder that
            makes vectors.
        engine_args: Argument of vLLM for each MODEL, e.g. tensor_parallel_size=2; may be repeated.

    Raises:
        SettingsError: Nothing is named, or a model is not usable.
    """
    if not models and not adapters:
        raise SettingsError("name at least one MODEL or --adapter")
    file = _registry(registry)
    root = file.absolute().parent
    arguments = parse_engine_args(engine_args)
    entries = [
        msgspec.structs.replace(
            entry_of(each, root, max_model_len=max_model_len, task=task, engine_args=arguments),
            max_adapters=max_adapters,
        )
        for each in models
    ]
    for entry in entries:
        require_weights(ModelFiles(Path(entry.path)))
    added = [parse_adapter(each) for each in adapters]
    with registry_edit(file) as edit:
        for entry in entries:
            edit.add(entry)
        for base, directory, name in added:
            edit.add_adapter(base, name, directory)
    if json:
        names = [*(entry.name for entry in entries), *(name for _, _, name in added)]
        print_data({"registry": str(file), "added": names}, as_json=True)
        return EXIT_OK
    for entry in entries:
        print(f"added {entry.name}: {_summary(entry)}")
    for base, directory, name in added:
        print(f"added {name}: adapter of {base} in {directory}")
    return EXIT_OK


@MODELS.command(name="list")
def list_models(*, registry: Registry = None, json: JsonOption = False) -> int:
    """List the models with their adapters."""
    found = _file(_registry(registry))
    entries = found.models
    if json:
        print_data(entries, as_json=True)
        return EXIT_OK
    for each in found.splits:
        print(f"{each.name}: split {each.weights}, fallback {each.fallback or 'none'}")
    table = Table()
    add_columns(table, ("model", "task"))
    table.add_column("architecture", overflow="fold")
    add_columns(table, ("max_model_len",))
    longest = max((len(name) for entry in entries for name in entry.adapters), default=0)
    table.add_column("adapters", min_width=longest + 1)
    table.add_column("path", overflow="fold")
    for entry in entries:
        adapters = ", ".join(entry.adapters)
        length = str(entry.max_model_len)
        table.add_row(entry.name, entry.task, entry.architecture, length, adapters, entry.path)
    print_tables(table)
    return EXIT_OK


@MODELS.command
def show(
    name: Annotated[str, Parameter(help="Name of the model.")],
    /,
    *,
    registry: Registry = None,
    json: JsonOption = False,
) -> int:
    """
    Show the entry of one model.

    Raises:
        SettingsError: There is no such model.
    """
    file = _registry(registry)
    entries = _file(file).models
    found = [entry for entry in entries if entry.name == name]
    if not found:
        known = ", ".join(entry.name for entry in entries) or "none"
        raise SettingsError(f"{file} has no model {name!r}; its models: {known}")
    print_data(found[0], as_json=json)
    return EXIT_OK


@MODELS.command
def check(
    names: Annotated[
        tuple[str, ...], Parameter(name="name", help="Models to check; default: all.")
    ] = (),
    /,
    *,
    memory: Annotated[str | None, Parameter(metavar="SIZE")] = None,
    registry: Registry = None,
    json: JsonOption = False,
) -> int:
    """
    Find missing files, and compute which models fit into memory.

    Args:
        memory: Memory of the device for weights and KV, e.g. 24GiB; default: the first GPU, else
            the available host memory. The engine's own memory is not counted.

    Raises:
        SettingsError: There is no such model, or the size of the memory is invalid or unknown.
    """
    room = detected_memory() if memory is None else Memory("given", parse_memory(memory))
    file = _registry(registry)
    known = ModelRegistry.load(file)
    unknown = [name for name in names if name not in known.bases]
    if unknown:
        raise SettingsError(
            f"{file} has no model {unknown[0]!r}; its models: {', '.join(known.bases)}"
        )
    checks = [check_model(known.entry(ModelName(name)), room) for name in names or known.bases]
    if json:
        data = {"device": room.device, "memory_bytes": room.num_bytes, "models": checks}
        print_data(data, as_json=True)
    else:
        print(f"memory: {_size(room.num_bytes)} ({room.device})")
        for each in checks:
            fitting = each.concurrent_requests
            print(
                f"{each.model}: {'ok' if each.usable else 'NOT USABLE'}; weights "
                f"{_size(each.weight_bytes)}, KV {_size(each.request_bytes)} for one "
                f"request of {each.max_model_len} tokens, "
                f"{'unlimited' if fitting is None else fitting} such requests at once"
            )
            for problem in each.problems:
                print(f"  {problem}")
    return EXIT_OK if all(each.usable for each in checks) else EXIT_FAILED


@MODELS.command
def split(
    name: Annotated[str, Parameter(help="Name in requests.")],
    targets: Annotated[tuple[str, ...], Parameter(name="MODEL=WEIGHT")],
    /,
    *,
    fallback: Annotated[str | None, Parameter(metavar="MODEL")] = None,
    registry: Registry = None,
    json: JsonOption = False,
) -> int:
    """
    Divide the requests for a name among models; replaces an earlier split.

    Args:
        targets: Model, alias or adapter, and its share of the requests relative to the other
            weights.
        fallback: Model for requests that would probably be late on their target.
    """
    file = _registry(registry)
    weights = dict(parse_weight(each) for each in targets)
    with registry_edit(file) as edit:
        edit.set_split(TrafficSplit(name=ModelName(name), weights=weights, fallback=fallback))
    if json:
        data = {"registry": str(file), "split": name, "weights": weights}
        print_data(data, as_json=True)
    else:
        total = sum(weights.values())
        shares = ", ".join(f"{model} {weight / total:.1%}" for model, weight in weights.items())
        print(f"{name}: {shares}")
    return EXIT_OK


def parse_weight(text: str) -> tuple[str, float]:
    """
    Target and weight of `MODEL=WEIGHT`.

    Raises:
        SettingsError: The text has another form, or the weight is not above 0.
    """
    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = 0.0
    if not name or not 0 < weight < math.inf:
        raise SettingsError(f"{text!r} has not the form MODEL=WEIGHT with a weight above 0")
    return name, weight


@MODELS.command
def remove(
    names: Annotated[
        tuple[str, ...], Parameter(name="name", help="Names of models, adapters or splits.")
    ],
    /,
    *,
    registry: Registry = None,
    json: JsonOption = False,
) -> int:
    """
    Remove models, adapters or splits; files of models are not deleted.

    Raises:
        SettingsError: The file does not exist, or has no such entry.
    """
    file = _registry(registry)
    if not file.exists():
        raise SettingsError(f"registry file {file} does not exist")
    with registry_edit(file) as edit:
        for each in names:
            edit.remove(each)
    if json:
        print_data({"registry": str(file), "removed": names}, as_json=True)
    else:
        print(f"removed {', '.join(names)}")
    return EXIT_OK


def _registry(given: Path | None) -> Path:
    """
    The registry file.

    Raises:
        SettingsError: Neither the option nor the variable names one.
    """
    file = given or file_of("HEADWAY_REGISTRY")
    if file is None:
        raise SettingsError("give --registry FILE or set HEADWAY_REGISTRY")
    return file


def _file(file: Path) -> RegistryFile:
    """The registry file, with directories as written there."""
    return decode_registry(file, read_registry(file))


def _summary(entry: ModelEntry) -> str:
    parsers = [f"tool parser {entry.tool_parser}"] if entry.tool_parser else []
    parsers += [f"reasoning parser {entry.reasoning_parser}"] if entry.reasoning_parser else []
    return ", ".join([
        entry.architecture,
        f"task {entry.task}",
        f"{entry.max_model_len} tokens",
        f"weights {_size(entry.weight_bytes)}",
        *parsers,
    ])  # fmt: skip


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
