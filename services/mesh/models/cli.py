"""`headway models`: the models of a registry file."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table

from services.mesh.models.checks import Memory, check_model, detected_memory, parse_memory
from services.mesh.models.sources import entry_of, parse_adapter
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry, ModelTask, TrafficSplit
from shared.models.files.model_files import ModelFiles, require_weights
from shared.models.registry import ModelRegistry, RegistryFile, decode_registry, read_registry
from shared.models.registry_edit import registry_edit
from shared.runtime.arguments import TextHelpFormatter
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE

Options = argparse.Namespace

DESCRIPTION = """\
Add, list, check and remove the models of a registry file.

All services of a mesh read the registry file and follow its changes: an added model is served
within seconds, and the requests of a removed model are still answered."""
EPILOG = """\
examples:
  headway models add ./Llama-3-8B                        a directory; its name is the model's name
  headway models add Qwen/Qwen2.5-7B-Instruct=qwen       an id of the Hugging Face hub
  headway models add --adapter qwen=./sql-lora=qwen-sql  a LoRA adapter of the model `qwen`
  headway models check --memory 24GiB                    what fits into 24 GiB
  headway models split chat qwen=95 qwen-new=5           5 % of the requests for `chat` try qwen-new
  headway models remove qwen-sql

exit codes: 0 ok, 1 `check` found a problem, 2 usage or an unusable model"""


def parser(registry: Path | None) -> argparse.ArgumentParser:
    """Create the parser of the command line; *registry* is the default file."""
    root = argparse.ArgumentParser(
        prog="headway models",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=TextHelpFormatter,
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.add_argument(
            "--registry",
            type=Path,
            default=registry,
            metavar="FILE",
            help="the registry file; default: HEADWAY_REGISTRY",
        )
        made.add_argument("--json", action="store_true", help="machine-readable output")
        return made

    add = verb("add", "add models from their own files; creates the registry file if necessary")
    add.add_argument(
        "models",
        nargs="*",
        metavar="MODEL[=NAME]",
        help="directory of a model, or an id org/name[@revision] of the Hugging Face hub, which is "
        "downloaded; NAME is the name in requests",
    )
    add.add_argument(
        "--adapter",
        action="append",
        default=[],
        dest="adapters",
        metavar="BASE=DIR[=NAME]",
        help="add the LoRA adapter in DIR to the model BASE; NAME is the name in requests; may be "
        "repeated",
    )
    add.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="limit of prompt plus answer, if it is less than the model's own",
    )
    add.add_argument(
        "--max-adapters",
        type=int,
        default=0,
        metavar="N",
        help="room for N LoRA adapters in engines of each MODEL, for adapters that are added later",
    )
    add.add_argument(
        "--task",
        choices=get_args(ModelTask),
        help="task of each MODEL whose files do not determine it, e.g. embed for a decoder that "
        "makes vectors",
    )
    verb("list", "list the models with their adapters")
    show = verb("show", "show the entry of one model")
    show.add_argument("name", help="name of the model")
    check = verb("check", "find missing files, and compute which models fit into memory")
    check.add_argument("names", nargs="*", metavar="NAME", help="models to check; default: all")
    check.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of the device for weights and KV, e.g. 24GiB; default: the first GPU, else "
        "the available host memory. The engine's own memory is not counted",
    )
    split = verb("split", "divide the requests for a name among models; replaces an earlier split")
    split.add_argument("name", help="name in requests")
    split.add_argument(
        "targets",
        nargs="+",
        metavar="MODEL=WEIGHT",
        help="model, alias or adapter, and its share of the requests relative to the other weights",
    )
    split.add_argument(
        "--fallback",
        metavar="MODEL",
        help="model for requests over AMQP with a text prompt that would be late on their target",
    )
    remove = verb("remove", "remove models, adapters or splits; files of models are not deleted")
    remove.add_argument(
        "names", nargs="+", metavar="NAME", help="names of models, adapters or splits"
    )
    return root


def add(options: Options) -> int:
    """Add models and adapters to the registry file."""
    if not options.models and not options.adapters:
        raise SettingsError("name at least one MODEL or --adapter")
    root = options.registry.absolute().parent
    entries = [
        msgspec.structs.replace(
            entry_of(each, root, max_model_len=options.max_model_len, task=options.task),
            max_adapters=options.max_adapters,
        )
        for each in options.models
    ]
    for entry in entries:
        require_weights(ModelFiles(Path(entry.path)))
    adapters = [parse_adapter(each) for each in options.adapters]
    with registry_edit(options.registry) as edit:
        for entry in entries:
            edit.add(entry)
        for base, directory, name in adapters:
            edit.add_adapter(base, name, directory)
    if options.json:
        names = [*(entry.name for entry in entries), *(name for _, _, name in adapters)]
        print_data({"registry": str(options.registry), "added": names}, as_json=True)
        return EXIT_OK
    for entry in entries:
        print(f"added {entry.name}: {_summary(entry)}")
    for base, directory, name in adapters:
        print(f"added {name}: adapter of {base} in {directory}")
    return EXIT_OK


def list_models(options: Options) -> int:
    """List the models of the registry file."""
    entries = _entries(options)
    if options.json:
        print_data(entries, as_json=True)
        return EXIT_OK
    for split in _file(options).splits:
        print(f"{split.name}: split {split.weights}, fallback {split.fallback or 'none'}")
    table = Table()
    for name in ("model", "task", "architecture", "max_model_len", "adapters", "path"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        adapters = ", ".join(entry.adapters)
        length = str(entry.max_model_len)
        table.add_row(entry.name, entry.task, entry.architecture, length, adapters, entry.path)
    Console().print(table)
    return EXIT_OK


def show(options: Options) -> int:
    """Print the entry of one model."""
    found = [entry for entry in _entries(options) if entry.name == options.name]
    if not found:
        raise SettingsError(_unknown(options))
    print_data(found[0], as_json=options.json)
    return EXIT_OK


def check(options: Options) -> int:
    """Check models; fail if one of them cannot be served."""
    memory = detected_memory()
    if options.memory is not None:
        memory = Memory("given", parse_memory(options.memory))
    registry = ModelRegistry.load(options.registry)
    unknown = [name for name in options.names if name not in registry.bases]
    if unknown:
        raise SettingsError(
            f"{options.registry} has no model {unknown[0]!r}; its models: "
            f"{', '.join(registry.bases)}"
        )
    names = options.names or registry.bases
    checks = [check_model(registry.entry(ModelName(name)), memory) for name in names]
    if options.json:
        data = {"device": memory.device, "memory_bytes": memory.num_bytes, "models": checks}
        print_data(data, as_json=True)
    else:
        print(f"memory: {_size(memory.num_bytes)} ({memory.device})")
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


def split(options: Options) -> int:
    """Add or replace a split."""
    weights = dict(parse_weight(each) for each in options.targets)
    with registry_edit(options.registry) as edit:
        edit.set_split(
            TrafficSplit(name=ModelName(options.name), weights=weights, fallback=options.fallback)
        )
    if options.json:
        data = {"registry": str(options.registry), "split": options.name, "weights": weights}
        print_data(data, as_json=True)
    else:
        total = sum(weights.values())
        shares = ", ".join(f"{name} {weight / total:.1%}" for name, weight in weights.items())
        print(f"{options.name}: {shares}")
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


def remove(options: Options) -> int:
    """Remove models, adapters or splits from the registry file."""
    if not options.registry.exists():
        raise SettingsError(f"registry file {options.registry} does not exist")
    with registry_edit(options.registry) as edit:
        for name in options.names:
            edit.remove(name)
    if options.json:
        print_data({"registry": str(options.registry), "removed": options.names}, as_json=True)
    else:
        print(f"removed {', '.join(options.names)}")
    return EXIT_OK


def _entries(options: Options) -> tuple[ModelEntry, ...]:
    """The entries of the registry file, with directories as written there."""
    return _file(options).models


def _file(options: Options) -> RegistryFile:
    return decode_registry(options.registry, read_registry(options.registry))


def _unknown(options: Options) -> str:
    known = ", ".join(entry.name for entry in _entries(options)) or "none"
    return f"{options.registry} has no model {options.name!r}; its models: {known}"


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


VERBS: dict[str, Callable[[Options], int]] = {
    "add": add,
    "list": list_models,
    "show": show,
    "check": check,
    "split": split,
    "remove": remove,
}


def main(argv: Sequence[str]) -> int:
    """Entry point of `headway models` with the arguments *argv*; returns the exit code."""
    default = os.environ.get("HEADWAY_REGISTRY")
    options = parser(Path(default) if default else None).parse_args(argv)
    try:
        return _run(options)
    except SettingsError as error:
        print(f"headway models {options.verb}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (OSError, msgspec.MsgspecError) as error:
        print(f"headway models {options.verb}: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(options: Options) -> int:
    if options.registry is None:
        raise SettingsError("give --registry FILE or set HEADWAY_REGISTRY")
    return VERBS[options.verb](options)
