"""`headway`: the whole mesh for operators and producers."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.table import Table

from services.mesh import arguments, dead_letters
from services.mesh.attached import API_KEY, attached
from services.mesh.doctor.doctor import diagnose
from services.mesh.doctor.findings import Level
from services.mesh.launch import mesh_of
from services.mesh.models.cli import main as models
from services.mesh.models.sources import write_model_registry
from services.mesh.queues import ask_leader, count_queues, meaning_of
from services.mesh.spec import AgentSpec, MeshSpec
from services.mesh.submit import (
    all_completed,
    call_request,
    is_streamed,
    read_requests,
    submit_all,
    submit_one,
)
from services.mesh.tenants.cli_keys import main as keys
from services.mesh.tenants.cli_usage import usage
from services.mesh.top import watch
from services.planner.cli import main as planner
from shared.broker import topology
from shared.broker.connect import broker_user
from shared.broker.declaring import declare_topology
from shared.contracts.errors import (
    BrokerUnavailableError,
    ContractError,
    MeshError,
    SettingsError,
    StoreUnavailableError,
)
from shared.contracts.ingress import InferenceRequest
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import Importance, OnLate, Slo
from shared.contracts.requests import ReplyMode, RequestFailed
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Request
from shared.runtime.checkout import run_from_checkout
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_NO_BROKER, EXIT_OK, EXIT_USAGE
from shared.runtime.logging import configure_logging
from shared.runtime.settings import DEFAULT_AMQP_URL, load_group, masked_url
from shared.runtime.tasks import pause
from shared.store.cli import main as store
from shared.store.location import location_of
from shared.store.migrating import migrate
from shared.store.settings import StoreSettings

Options = argparse.Namespace
DATA_DIR = ".headway/data"
MIGRATION_TIMEOUT_S = 60.0


async def up(options: Options) -> int:
    """Run the mesh until Ctrl-C."""
    broker = options.broker or options.amqp_url
    tenants = options.tenants or _file_of("HEADWAY_TENANTS")
    keys = options.keys or _file_of("HEADWAY_GATEWAY_KEYS_FILE")
    registry, agents = await _fleet(options)
    bases = ModelRegistry.load(registry).bases
    kept = store_values(options, os.environ)
    spec = MeshSpec(
        broker=broker,
        registry=registry,
        log_dir=options.log_dir,
        gateway_port=options.port,
        gateway={"front": options.front}
        | ({} if kept is None else {"store": kept})
        | ({} if keys is None else {"keys_file": str(keys)}),
        planner={} if kept is None else {"store": kept},
        estimator={"usage_dir": str(options.log_dir / "usage")},
        tenants=tenants,
        agents=agents,
        groupers=options.groupers,
        leaders=options.leaders,
    )
    if kept is not None:
        await _migrated(kept)
    stop = asyncio.Event()
    starting = asyncio.current_task()

    def on_signal() -> None:
        if starting is not None and not stop.is_set():
            starting.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    print("starting", file=sys.stderr)
    async with mesh_of(spec) as mesh:
        starting = None
        print(
            f"ready: {spec.gateway_url}/v1  models: {', '.join(bases)}  "
            f"broker: {masked_url(broker)}  logs: {spec.log_dir}\nCtrl-C drains and stops",
            file=sys.stderr,
        )
        while not stop.is_set():
            mesh.check()
            await pause(stop, 1.0)
    return EXIT_OK


def store_values(options: Options, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """
    Settings of the store of `up`: options, then the environment, then SQLite in a directory.

    Returns:
        The settings; None without a store.

    Raises:
        SettingsError: A variable is invalid, or configures a store although there should be none.
    """
    settings = load_group(StoreSettings, group="store", environ=environ)
    if options.no_store:
        if settings != StoreSettings():
            raise SettingsError("--no-store contradicts the variables HEADWAY_STORE_*: unset them")
        return None
    data_dir = options.data_dir or settings.data_dir
    if data_dir is None and (settings.url is None or settings.files is None):
        data_dir = DATA_DIR
    if data_dir is not None:
        data_dir = str(Path(data_dir).absolute())
    values: dict[str, Any] = msgspec.to_builtins(settings)
    return values | {"data_dir": data_dir}


async def _migrated(values: dict[str, Any]) -> None:
    """
    Migrate the store. If it does not answer, the mesh starts without it.

    Raises:
        SettingsError: The store cannot be used as it is set.
    """
    location = location_of(msgspec.convert(values, StoreSettings))
    if location is None:
        return
    try:
        await migrate(location, timeout_s=MIGRATION_TIMEOUT_S)
    except StoreUnavailableError as error:
        print(f"store: {error}; files are not available until then", file=sys.stderr)


def _file_of(variable: str) -> Path | None:
    """The file that an environment variable names, as for single services."""
    text = os.environ.get(variable)
    return Path(text) if text else None


async def _fleet(options: Options) -> tuple[Path, tuple[AgentSpec, ...]]:
    """The registry, and the agents of our own engines and of attached servers."""
    number = options.agents if options.agents is not None else (0 if options.attach else 2)
    if number < 1 and not options.attach:
        raise SettingsError("--agents must be at least 1: agents serve the requests")
    registry = _registry(options, has_engines=number > 0)
    known = None if registry is None else ModelRegistry.load(registry)
    api_key = os.environ.get(API_KEY)
    # The light front renders nothing that needs vLLM at the agents.
    payloads = False if options.front == "light" else None
    entries, servers = await attached(
        options.attach, known=known, api_key=api_key, payloads=payloads
    )
    own = [] if known is None else [known.entry(base) for base in known.bases]
    if entries or registry is None:
        registry = options.log_dir / "registry.json"
        write_registry(registry, (*own, *entries))
    bases = [entry.name for entry in own if not entry.takes_bodies]
    agents = [
        AgentSpec(
            instance_id=f"agent-{number}",
            engine=options.engine,
            settings={"initial_model": bases[number % len(bases)]},
        )
        for number in range(number if bases else 0)
    ]
    return registry, (*agents, *servers)


def _registry(options: Options, *, has_engines: bool) -> Path | None:
    """
    Registry of the models that `up` serves: the given file, or a new file in `--log-dir`; None if
    only attached servers have models.
    """
    if options.models:
        return write_model_registry(
            options.models,
            options.log_dir / "models.json",
            engine=options.engine,
            adapters=options.adapters,
            max_model_len=options.max_model_len,
        )
    if options.adapters:
        raise SettingsError("--adapter needs --model; add adapters of a --registry to its file")
    if options.registry is not None:
        return Path(options.registry)
    if not has_engines:
        return None
    return make_tiny_models(options.log_dir / "models", weights=options.engine == "vllm")


async def submit(options: Options) -> int:
    """Publish one request, or the requests of a file, over AMQP."""
    arguments.check_submit(options)
    user_id = broker_user(options.amqp_url)
    async with broker_factory(options.amqp_url)("headway-submit") as broker:
        if options.file is not None:
            requests = read_requests(options.file)
            finals = await submit_all(broker, requests, user_id=user_id)
            return EXIT_OK if all_completed(finals) else EXIT_FAILED
        request = _request(options)
        shows_text = is_streamed(request) and not (options.final or options.json)
        final = await submit_one(
            broker,
            request,
            reply=ReplyMode.STREAM if shows_text else ReplyMode.FINAL,
            user_id=user_id,
            show=_shower(options),
        )
    if options.json:
        print_data(final, as_json=True)
    elif isinstance(final, RequestFailed):
        print(f"\n{final.error.code}: {final.error.message}", file=sys.stderr)
    else:
        print("" if shows_text or not final.response else bytes(final.response).decode())
        verdict, usage = final.verdict, final.usage
        print(
            f"{final.instance_id}: {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
            f"first after {verdict.ttft_s or 0:.3f} s, all after {verdict.ttlt_s or 0:.3f} s, "
            f"SLO {'attained' if verdict.attained else 'missed'}",
            file=sys.stderr,
        )
    return EXIT_FAILED if isinstance(final, RequestFailed) else EXIT_OK


def _shower(options: Options) -> Callable[[str], None]:
    """Callback that prints the text of an answer when the text arrives; None for JSON output."""

    def show(text: str) -> None:
        if not options.json:
            print(text, end="", flush=True)

    return show


def _request(options: Options) -> Request:
    slo = Slo(ttft_s=options.ttft, tbt_s=options.tbt, ttlt_s=options.ttlt)
    importance = None if options.importance is None else Importance(options.importance)
    not_before = arguments.begin_time(options.not_before, SystemClock().now())
    on_late = None if options.on_late is None else OnLate(options.on_late)
    if options.endpoint is not None:
        return call_request(
            options.endpoint,
            options.body,
            model=options.model,
            application=options.application,
            importance=importance,
            slo=None if slo == Slo() else slo,
            ttl_s=options.ttl,
            not_before=not_before,
            on_late=on_late,
        )
    if options.model is None or options.prompt is None:
        raise SettingsError("submit needs --model and a prompt, --endpoint and --body, or --file")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    return InferenceRequest(
        model=options.model,
        prompt=prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        application=options.application,
        importance=importance,
        slo=slo,
        ttl_s=options.ttl,
        not_before=not_before,
        on_late=on_late,
    )


async def top(options: Options) -> int:
    """Show the state of the mesh."""
    async with broker_factory(options.amqp_url)("headway-top") as broker:
        await declare_topology(broker)
        duration_s = 2.0 if options.once or options.json else float("inf")
        view = await watch(broker, duration_s=duration_s, live=not (options.once or options.json))
    if options.json:
        print_data(view.data(), as_json=True)
    elif options.once:
        Console().print(view.tables())
    return EXIT_OK if view.instances else EXIT_FAILED


async def queues(options: Options) -> int:
    """Print the depths of all queues."""
    if options.registry is None:
        raise SettingsError(
            "`queues` needs --registry or HEADWAY_REGISTRY, which determines the lanes"
        )
    models = ModelRegistry.load(options.registry).bases
    layout = _layout(os.environ.get("HEADWAY_LAYOUT"))
    async with broker_factory(options.amqp_url)("headway-queues") as broker:
        plan = await ask_leader(broker)
        if plan is None:
            print("no answer from a leader: inboxes are left out", file=sys.stderr)
        counts = await count_queues(broker, models, layout, plan)
    if options.json:
        print_data(counts, as_json=True)
        return EXIT_OK
    table = Table()
    table.add_column("queue")
    table.add_column("ready", justify="right")
    table.add_column("consumers", justify="right")
    table.add_column("requests")
    for entry in counts:
        meaning = meaning_of(entry.queue, layout)
        table.add_row(entry.queue, str(entry.ready), str(entry.consumers), meaning)
    Console().print(table)
    return EXIT_OK


def _layout(text: str | None) -> LaneLayout:
    """Lane layout of the mesh, from the environment variable that the services also read."""
    try:
        return LaneLayout() if text is None else msgspec.json.decode(text, type=LaneLayout)
    except msgspec.DecodeError as error:
        raise SettingsError(f"HEADWAY_LAYOUT: {error}") from error


async def dead_letter(options: Options) -> int:
    """List, requeue or delete dead letters."""
    if options.action == "purge" and not options.yes:
        raise SettingsError("purge deletes dead letters permanently: confirm with --yes")
    if options.limit is not None and options.limit < 1:
        raise SettingsError("--limit must be at least 1")
    async with broker_factory(options.amqp_url)("headway-dead-letter") as broker:
        if options.action == "purge" and options.id is None and options.limit is None:
            print_data({"purged": await broker.purge(topology.DEAD_LETTERS)}, as_json=options.json)
            return EXIT_OK
        done, action = DEAD_LETTER_ACTIONS[options.action]
        letters = await dead_letters.process(
            broker,
            action=action,
            limit=options.limit or DEAD_LETTERS_AT_ONCE,
            wanted=lambda letter: options.id is None or letter.id == options.id,
        )
    if options.action == "purge":
        print_data({"purged": len(letters)}, as_json=options.json)
    elif options.json:
        print_data(letters, as_json=True)
    else:
        for letter in letters:
            print(f"{letter.id}\t{letter.num_bytes} B\t{letter.queue}\t{letter.reason}")
        print(f"{len(letters)} {done}", file=sys.stderr)
    return EXIT_OK if letters or options.id is None else EXIT_FAILED


async def doctor(options: Options) -> int:
    """Print what about the broker deviates from what the mesh needs."""
    if urlsplit(options.amqp_url).scheme not in ("amqp", "amqps"):
        raise SettingsError("`doctor` needs a broker: --amqp-url amqp://user:password@host/vhost")
    findings = [finding async for finding in diagnose(options.amqp_url, SystemClock())]
    if options.json:
        print_data(findings, as_json=True)
    else:
        print(f"{masked_url(options.amqp_url)}\n")
        print("\n".join(finding.text for finding in findings))
    is_fine = all(finding.level is not Level.DEVIATION for finding in findings)
    return EXIT_OK if is_fine else EXIT_FAILED


DEAD_LETTERS_AT_ONCE = 50
DEAD_LETTER_ACTIONS = {
    "peek": ("seen", dead_letters.keep),
    "requeue": ("requeued", dead_letters.requeue),
    "purge": ("purged", dead_letters.drop),
}
"""Action on dead letters -> past participle of the action for the output, and its function."""

VERBS: dict[str, Callable[[Options], Coroutine[Any, Any, int]]] = {
    "up": up,
    "submit": submit,
    "top": top,
    "queues": queues,
    "dead-letter": dead_letter,
    "doctor": doctor,
    "usage": usage,
}

CHECKOUT_PROGRAMS = {"simulate": "ops.sim", "profile": "ops.profiling"}
"""Verb -> module of its program, which is part of a checkout, not of the installed package."""

OTHER_PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {
    **dict.fromkeys(CHECKOUT_PROGRAMS, lambda given: _from_checkout(given[0], given[1:])),
    "models": lambda given: models(given[1:]),
    "store": lambda given: store(given[1:]),
    "keys": lambda given: keys(given[1:]),
    "plan": lambda given: planner(given, prog="headway"),
}
"""Verb that has its own command line -> function that receives all arguments."""


def _from_checkout(verb: str, arguments: Sequence[str]) -> int:
    """
    Run the program of *verb* and return its exit code.

    Raises:
        SettingsError: The program cannot be imported, since no checkout is found.
    """
    return run_from_checkout(f"headway {verb}", CHECKOUT_PROGRAMS[verb], arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    verb = given[0] if given else ""
    try:
        if verb in OTHER_PROGRAMS:
            return OTHER_PROGRAMS[verb](given)
        registry = os.environ.get("HEADWAY_REGISTRY")
        options = arguments.parser(
            amqp_url=os.environ.get("HEADWAY_AMQP_URL", DEFAULT_AMQP_URL),
            registry=Path(registry) if registry else None,
        ).parse_args(given)
        configure_logging(level="warning", service="headway")
        return asyncio.run(VERBS[options.verb](options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_OK
    except (SettingsError, ContractError) as error:
        print(f"headway {verb}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokerUnavailableError as error:
        print(f"headway {verb}: broker: {error}", file=sys.stderr)
        return EXIT_NO_BROKER
    except MeshError as error:
        print(f"headway {verb}: {error}", file=sys.stderr)
        return EXIT_FAILED
