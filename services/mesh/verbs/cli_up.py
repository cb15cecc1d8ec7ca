"""`headway up`: a whole mesh on this machine."""

import asyncio
import os
import secrets
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter

from services.agent.devices.found import Device, Provider, nvidia_devices
from services.mesh.launch import mesh_of
from services.mesh.mesh import Mesh, stop_signals
from services.mesh.models.sources import write_model_registry
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from services.mesh.verbs.options import AMQP_VARIABLE, DATA_DIR, UncheckedAmqpUrl, file_of
from shared.contracts.base import ModelName
from shared.contracts.errors import BrokerUnavailableError, SettingsError, StoreUnavailableError
from shared.contracts.models import ModelEntry
from shared.models.host_memory import available_host_bytes
from shared.models.registry import ModelRegistry, write_registry
from shared.runtime import extensions
from shared.runtime.lifecycle import EXIT_OK
from shared.runtime.options import LAST_PORT, File, Folder, Port, Positive, read_by, whole
from shared.runtime.settings import DEFAULT_AMQP_URL, load_group, masked_url
from shared.store.settings import StoreSettings

MIGRATION_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 1800.0
"""Time limit until all models are loaded; agents have limits of their own for each step."""
_MODELS = Parameter(group=Group("Models", sort_key=1))
_ENGINES = Parameter(group=Group("Engines", sort_key=2))
_PLACES = Parameter(group=Group("Files", sort_key=3))
SIMULATED, VLLM = "simulated", "vllm"
VLLM_PYTHON = "HEADWAY_AGENT_ENGINE__VLLM__PYTHON"
"""Variable with another interpreter that has vLLM."""


def _engine(text: str) -> str:
    """The name of a backend of engines that the mesh starts."""
    own = (SIMULATED, VLLM)
    if text not in own and text not in (added := extensions.names(extensions.ENGINES)):
        raise ValueError(f"{text!r} must be one of: {', '.join((*own, *added))}")
    return text


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of `up`."""

    registry: Annotated[File | None, _MODELS] = None
    """
    Models to serve; default: HEADWAY_REGISTRY, else tiny models are created in --log-dir.
    """
    models: Annotated[
        tuple[str, ...], _MODELS, Parameter(name="--model", metavar="MODEL[=NAME]")
    ] = ()
    """
    Model to serve: a directory, or an id org/name[@revision] of the Hugging Face hub; NAME is the
    name in requests; may be repeated. The registry is written to --log-dir; `headway models`
    changes it while the mesh runs.
    """
    adapters: Annotated[
        tuple[str, ...], _MODELS, Parameter(name="--adapter", metavar="BASE=DIR[=NAME]")
    ] = ()
    """LoRA adapter of the --model with the name BASE; may be repeated."""
    max_model_len: Annotated[Positive | None, _MODELS, Parameter(metavar="TOKENS")] = None
    """Limit of prompt plus answer of each --model, if it is less than the model's own."""
    engine_args: Annotated[
        tuple[str, ...], _MODELS, Parameter(name="--engine-arg", metavar="NAME=VALUE")
    ] = ()
    """Argument of vLLM for each --model, e.g. tensor_parallel_size=2; may be repeated."""
    broker: Annotated[str | None, Parameter(metavar="URL")] = None
    """
    AMQP URL (default: value of --amqp-url); with `embedded` all services run in one process
    without an external broker.
    """
    agents: Annotated[Annotated[int, whole(least=0)] | None, _ENGINES] = None
    """
    Number of engines, each with its agent; default: 0 with --attach, else as many as use the GPUs,
    or 2 without GPUs.
    """
    devices: Annotated[str | None, _ENGINES, Parameter(metavar="IDS")] = None
    """
    GPUs to use, e.g. 0,1 or GPU-5c8a,MIG-4f2b; default: all that CUDA_VISIBLE_DEVICES leaves
    visible. Each agent takes one, or as many as tensor_parallel_size x pipeline_parallel_size of
    its model.
    """
    attach: Annotated[tuple[str, ...], _ENGINES, Parameter(metavar="[NAME=]URL[#MODEL]")] = ()
    """
    Serve with servers that others run, e.g. http://models.example:8000; each address of the name is
    an instance. Also file:PATH with one address per line, and router+URL for a router. NAME is the
    model's name in the mesh, MODEL its name at the server. Repeatable. HEADWAY_ATTACH_API_KEY has
    the servers' key.
    """
    engine: Annotated[str | None, _ENGINES, read_by(_engine, metavar="NAME")] = None
    """
    Engine backend of every agent: vllm; simulated, which answers with random text; or the name of a
    backend that an installed package adds. Default: vllm with --model, else simulated.
    """
    tenants: Annotated[File | None, _PLACES] = None
    """Policies of tenants; default: HEADWAY_TENANTS."""
    keys: Annotated[File | None, _PLACES] = None
    """API keys made by `headway keys`; default: HEADWAY_GATEWAY_KEYS_FILE."""
    groupers: Positive = 1
    """Number of groupers, which share incoming requests."""
    leaders: Positive = 1
    """Number of leaders: one is active, and another replaces a failed leader."""
    port: Port = 8000
    """Port of the gateway, which listens on this machine only."""
    gateways: Positive = 1
    """Number of gateways, each with a port of its own, its metrics and its limits, from --port."""
    data_dir: Annotated[Folder | None, _PLACES] = None
    """
    Directory of the store: files and what else outlives a connection; default:
    HEADWAY_STORE_DATA_DIR, else .headway/data. HEADWAY_STORE_URL and HEADWAY_STORE_FILES select
    another place.
    """
    no_store: Annotated[bool, _PLACES] = False
    """Keep nothing: the Files API answers with status 501."""
    log_dir: Annotated[Folder, _PLACES] = Path(".headway/up")
    """Directory for logs and settings, and for tiny models if --registry is not given."""

    @property
    def backend(self) -> str:
        """Engine backend of every agent."""
        return self.engine or (VLLM if self.models else SIMULATED)


_SERVICES = ("", "GATEWAY_", "PLANNER_", "ESTIMATOR_", "AGENT_")


def drop_replaced(options: UpOptions, environ: MutableMapping[str, str]) -> None:
    """
    Remove the variables that given options replace: services of the mesh read variables too, and
    prefer them to what `up` sets.
    """
    has_registry = options.registry is not None or bool(options.models)
    replaced = {
        "REGISTRY": has_registry,
        "TENANTS": options.tenants is not None,
        "AMQP_URL": options.broker is not None,
        "PORT": True,
        "KEYS_FILE": options.keys is not None,
        "STORE_DATA_DIR": options.data_dir is not None,
    }
    for field, is_given in replaced.items():
        if is_given:
            for service in _SERVICES:
                environ.pop(f"HEADWAY_{service}{field}", None)


async def up(
    *, options: UpOptions = UpOptions(), amqp_url: UncheckedAmqpUrl = DEFAULT_AMQP_URL
) -> int:
    """Run a whole mesh on this machine until Ctrl-C."""
    broker = amqp_url if options.broker is None else options.broker
    if not broker.strip():
        raise SettingsError(f"{_broker_option(options)} is empty: give an AMQP URL, or omit it")
    _check_ports(options)
    _check_engine(options)
    tenants = options.tenants or file_of("HEADWAY_TENANTS")
    keys = options.keys or file_of("HEADWAY_GATEWAY_KEYS_FILE")
    registry, agents = await fleet(options)
    known = ModelRegistry.load(registry)
    bases = known.bases
    kept = store_values(options, os.environ)
    token = secrets.token_urlsafe(24)
    drop_replaced(options, os.environ)
    spec = MeshSpec(
        broker=broker,
        registry=registry,
        log_dir=options.log_dir,
        gateway_port=options.port,
        gateways=options.gateways,
        gateway={
            "console_token": token,
            "ready_models": served_models(agents, known),
        }
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

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    _say("starting")
    for agent in agents:
        if agent.place:
            _say(f"{agent.instance_id}: {agent.place}")
    async with AsyncExitStack() as stack:
        mesh = await _started(spec, stack)
        starting = None
        if any(agent.engine == SIMULATED for agent in agents):
            _say("ENGINE: SIMULATED: ANSWERS ARE RANDOM TEXT")
        _say(
            f"ready: {', '.join(f'{url}/v1' for url in spec.gateway_urls)}  "
            f"models: {', '.join(bases)}  broker: {masked_url(broker)}  logs: {spec.log_dir}\n"
            f"console: {spec.gateway_url}/console?token={token}  (opens once)\n"
            "Ctrl-C drains and stops"
        )
        from services.mesh.supervision import Supervisor  # noqa: PLC0415 - as in `_started`

        await Supervisor(mesh, _say).run(stop)
    return EXIT_OK


def _broker_option(options: UpOptions) -> str:
    """Where the broker is named, for errors."""
    if options.broker is not None:
        return "--broker"
    return "--amqp-url" if os.environ.get(AMQP_VARIABLE, "-").strip() else AMQP_VARIABLE


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def served_models(agents: Sequence[AgentSpec], registry: ModelRegistry) -> list[ModelName]:
    """The models of *registry* that *agents* are started for."""
    own = [base for base in registry.bases if not registry.entry(base).takes_bodies]
    served = {name for agent in agents for name in agent.settings.get("models", own)}
    return [base for base in registry.bases if base in served]


async def _started(spec: MeshSpec, stack: AsyncExitStack) -> Mesh:
    """
    Start the mesh, which *stack* stops.

    Raises:
        SettingsError: A port or the id of an instance is in use.
        BrokerUnavailableError: No broker answers.
        MeshError: The mesh does not start.
    """
    # Only here, since these import more than all that `--help` needs.
    from services.mesh.start_checks import check_instances, check_ports  # noqa: PLC0415
    from shared.broker.connect import open_broker  # noqa: PLC0415

    check_ports(spec)
    try:
        if spec.broker != EMBEDDED:
            async with open_broker(spec.broker, client_name="headway-up") as broker:
                await check_instances(broker, spec)
        mesh = mesh_of(spec, ready_timeout_s=LOAD_TIMEOUT_S, say=_say)
        return await stack.enter_async_context(mesh)
    except BrokerUnavailableError as error:
        raise BrokerUnavailableError(
            f"no RabbitMQ answers at {masked_url(spec.broker)} ({error}). Start one (`sudo make "
            "broker`), name one (--broker URL), or use --broker embedded"
        ) from error


def _check_ports(options: UpOptions) -> None:
    """
    Check that each gateway has a port.

    Raises:
        SettingsError: The last one would be above the highest port.
    """
    last = options.port + options.gateways - 1
    if last > LAST_PORT:
        raise SettingsError(
            f"--gateways {options.gateways} from --port {options.port} needs ports up to {last}; "
            f"the highest is {LAST_PORT}"
        )


def _check_engine(options: UpOptions) -> None:
    """
    Check that this installation has the engine.

    Raises:
        SettingsError: It has not; the message says how to install it.
    """
    from services.agent.backends.vllm.front.process import (  # noqa: PLC0415 - only for vLLM
        vllm_unavailable_reason,
    )

    if options.backend != VLLM or VLLM_PYTHON in os.environ:
        return
    if (reason := vllm_unavailable_reason()) is not None:
        why = "" if options.engine else "--model is served by vLLM. "
        raise SettingsError(f"{why}{reason} (--engine simulated), whose answers are random text")


def store_values(options: UpOptions, environ: Mapping[str, str]) -> dict[str, Any] | None:
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
    data_dir: str | Path | None = options.data_dir or settings.data_dir
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
    # Only here, since SQLAlchemy takes longer to import than all that `--help` needs.
    from shared.store.location import location_of  # noqa: PLC0415
    from shared.store.migrating import migrate  # noqa: PLC0415

    location = location_of(msgspec.convert(values, StoreSettings))
    if location is None:
        return
    try:
        await migrate(location, timeout_s=MIGRATION_TIMEOUT_S)
    except StoreUnavailableError as error:
        print(f"store: {error}; files are not available until then", file=sys.stderr)


async def fleet(
    options: UpOptions, provider: Provider = nvidia_devices
) -> tuple[Path, tuple[AgentSpec, ...]]:
    """
    The registry, and the agents of our own engines and of attached servers.

    Args:
        options: Options of `up`.
        provider: Returns the devices of this machine.
    """
    number = options.agents if options.agents is not None else (0 if options.attach else 2)
    if number < 1 and not options.attach:
        raise SettingsError("--agents must be at least 1: agents serve the requests")
    devices = _devices(options, provider) if number or options.devices else ()
    registry = _registry(options, has_engines=number > 0 or bool(devices))
    known = None if registry is None else ModelRegistry.load(registry)
    entries, servers = await _attached(options, known)
    own = [] if known is None else [known.entry(base) for base in known.bases]
    if entries or registry is None:
        registry = options.log_dir / "registry.json"
        write_registry(registry, (*own, *entries))
    own = [entry for entry in own if not entry.takes_bodies]
    if devices and own:
        return registry, (*_placed(options, own, devices), *servers)
    bases = [entry.name for entry in own]
    agents = [
        AgentSpec(
            instance_id=f"agent-{number}",
            engine=options.backend,
            settings={"initial_model": bases[number % len(bases)]},
        )
        for number in range(number if bases else 0)
    ]
    return registry, (*agents, *servers)


def _devices(options: UpOptions, provider: Provider) -> tuple[Device, ...]:
    """The devices of the engines; none if they run on the CPU."""
    # Imported only where they are used; `placing` imports OR-Tools.
    from services.agent.backends.vllm.front.process import is_cpu_build  # noqa: PLC0415

    is_cpu = options.backend == SIMULATED or (VLLM_PYTHON not in os.environ and is_cpu_build())
    if is_cpu and options.devices is None:
        return ()
    from services.mesh.placing import engine_devices  # noqa: PLC0415

    return engine_devices(options.backend, options.devices, os.environ, provider)


def _placed(
    options: UpOptions, entries: list[ModelEntry], devices: tuple[Device, ...]
) -> list[AgentSpec]:
    """Agents on devices."""
    from services.mesh.placing import placed_agents  # noqa: PLC0415 - OR-Tools

    return placed_agents(
        entries,
        devices,
        backend=options.backend,
        num_agents=options.agents,
        host_bytes=available_host_bytes(instead="start agents by hand"),
    )


async def _attached(
    options: UpOptions, known: ModelRegistry | None
) -> tuple[list[ModelEntry], list[AgentSpec]]:
    """Models and agents of attached servers."""
    if not options.attach:
        return [], []
    from services.mesh.attached import API_KEY, attached  # noqa: PLC0415 - an HTTP client

    api_key = os.environ.get(API_KEY)
    return await attached(options.attach, known=known, api_key=api_key)


def _registry(options: UpOptions, *, has_engines: bool) -> Path | None:
    """
    Registry of the models that `up` serves: the given file, or a new file in `--log-dir`; None if
    only attached servers have models.
    """
    if options.models and options.registry:
        raise SettingsError("--model and --registry exclude each other")
    if options.models:
        return write_model_registry(
            options.models,
            options.log_dir / "models.json",
            engine=options.backend,
            adapters=options.adapters,
            max_model_len=options.max_model_len,
            engine_args=options.engine_args,
        )
    if options.adapters:
        raise SettingsError("--adapter needs --model; add adapters of a --registry to its file")
    if options.engine_args:
        raise SettingsError("--engine-arg needs --model; a --registry has engine_args of its own")
    if (file := options.registry or file_of("HEADWAY_REGISTRY")) is not None:
        return file
    if not has_engines:
        return None
    from shared.models.tiny import make_tiny_models  # noqa: PLC0415 - NumPy

    return make_tiny_models(options.log_dir / "models", weights=options.backend == VLLM)
