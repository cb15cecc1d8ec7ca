"""Creates, connects and runs the gateway's components."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.gateway.added import added_resources
from services.gateway.application import application_of
from services.gateway.batches.application import BatchesResource
from services.gateway.batches.publishing import BatchPorts
from services.gateway.batches.runner import BatchRunner
from services.gateway.body import BodyMemory
from services.gateway.console.application import WithConsole
from services.gateway.console.sessions import Sessions
from services.gateway.console.watching import MeshWatch
from services.gateway.edge.edge import Edge, with_cors
from services.gateway.fallbacks import Fallbacks, forecasts_heard
from services.gateway.files.application import FilesResource
from services.gateway.files.retention import Retention
from services.gateway.instances import AwaitedModels, Instances, followed
from services.gateway.metrics import GatewayMetrics
from services.gateway.opening import Opening
from services.gateway.rate_limits import RateLimits, limits_followed
from services.gateway.reporting import Reporter
from services.gateway.requests.application import RequestsResource
from services.gateway.resources import Resource, WithResources
from services.gateway.responses.application import ResponsesResource, StoredResponses
from services.gateway.responses.opening import opened_responses
from services.gateway.responses.service import Responses
from services.gateway.settings import Settings
from services.gateway.state import Gateway
from services.gateway.tenants import Tenants, networks_of
from services.gateway.tracing import Traced
from services.gateway.webhooks.deliveries import PERIOD_S as WEBHOOKS_PERIOD_S
from services.gateway.webhooks.deliveries import Deliveries
from services.gateway.webhooks.sender import Sender
from services.gateway.webhooks.settings import check_webhooks
from shared.broker.amqp.connection import broker_user
from shared.broker.declaring import declare_topology
from shared.broker.protocol import Broker
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.control import GATEWAY_PERIOD_S
from shared.contracts.errors import SettingsError, StoreUnavailableError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.models.watch import PERIOD_S as WATCH_PERIOD_S
from shared.models.watch import RegistryWatch
from shared.producer.producer import Producer
from shared.runtime.cli import Ports
from shared.runtime.clock import Clock
from shared.runtime.health import Health, serve_http
from shared.runtime.tasks import drained, every
from shared.store.store import Store, opened_store, state_of
from shared.tenants.keys import KeyWatch, check_keys, open_keys
from shared.tenants.policies import (
    Policies,
    WatchedPolicies,
    check_policies,
    follow_policies,
    open_policies,
)

log = structlog.get_logger()

READINESS_PERIOD_S = 0.1


def check(settings: Settings) -> None:
    """
    Check the settings about bodies, tenants and webhooks, and the files that they name.

    Raises:
        SettingsError: A file cannot be read or is invalid, or a proxy's address or a webhook is;
            there is an identity header without trusted proxies; or one body may take too much of
            the memory for bodies.
    """
    # A tenant may take half of it, and a response that is stored has its body twice.
    if settings.max_open_body_bytes < 4 * settings.limits.max_body_bytes:
        raise SettingsError("max_open_body_bytes must be at least 4 times limits.max_body_bytes")
    check_policies(settings.tenants)
    check_keys(settings.keys_file)
    networks_of(settings.trusted_proxies)
    if settings.identity_header is not None and not settings.trusted_proxies:
        raise SettingsError(
            "identity_header needs trusted_proxies: any client could name any tenant otherwise"
        )
    check_webhooks(settings.webhooks)


async def serve(ports: Ports[Settings], stop: asyncio.Event) -> None:
    """
    Serve HTTP until *stop*, then let open requests finish until the drain timeout.

    Raises:
        SettingsError: The registry, the policies or the keys are invalid, or the port is in use.
        BrokerUnavailableError: The broker does not answer at start-up.
    """
    settings = ports.settings
    check(settings)
    registry = ModelRegistry.load(Path(settings.registry))
    async with (
        opened_store(settings.store) as store,
        ports.open_broker("gateway") as broker,
    ):
        await declare_topology(broker)
        access = await _opened_access(settings, store)
        async with _producer(ports, broker) as producer:
            gateway = _gateway(
                ports,
                stop,
                registry=registry,
                access=access,
                store=store,
                broker=broker,
                producer=producer,
            )
            await _serve(ports, gateway, broker, access)
    log.info("service.stopped")


def _producer(ports: Ports[Settings], broker: Broker) -> Producer:
    settings = ports.settings
    return Producer(
        broker,
        name="gateway",
        clock=ports.clock,
        user_id=broker_user(settings.amqp_url),
        give_up_after_s=settings.publish_timeout_s,
        silence_s=settings.reply_silence_s,
    )


@dataclass(frozen=True, slots=True)
class Access:
    """Policies of tenants, and keys; both can change."""

    policies: WatchedPolicies | Policies
    keys: KeyWatch | None

    async def follow(self, stop: asyncio.Event) -> None:
        """Follow changes until *stop*."""
        async with asyncio.TaskGroup() as group:
            group.create_task(follow_policies(self.policies, stop), name="follow-tenants")
            if self.keys is not None:
                group.create_task(
                    every(WATCH_PERIOD_S, self.keys.apply, stop=stop), name="follow-keys"
                )


async def _opened_access(settings: Settings, store: Store | None) -> Access:
    """
    Policies and keys, from their files or the store.

    Raises:
        SettingsError: The policies or the keys are invalid.
    """
    kept_s = settings.store.documents_kept_s
    return Access(
        policies=await open_policies(settings.tenants, store, kept_s=kept_s),
        keys=await open_keys(settings.keys_file, store, kept_s=kept_s),
    )


def _gateway(
    ports: Ports[Settings],
    stop: asyncio.Event,
    *,
    registry: ModelRegistry,
    access: Access,
    store: Store | None,
    broker: Broker,
    producer: Producer,
) -> Gateway:
    """The state that all requests share."""
    settings = ports.settings
    fallbacks = Fallbacks(
        registry=registry,
        layout=settings.layout,
        clock=ports.clock,
        answer_tokens=settings.limits.default_max_tokens,
    )
    return Gateway(
        settings=settings,
        registry=registry,
        fallbacks=fallbacks,
        tenants=Tenants(
            api_keys=settings.api_keys,
            default_tenant=settings.default_tenant,
            trust_fairness_header=settings.trust_fairness_header,
            max_outstanding=settings.max_outstanding_per_tenant,
            keys=access.keys,
            policies=access.policies,
            identity_header=settings.identity_header and settings.identity_header.lower(),
            trusted_proxies=networks_of(settings.trusted_proxies),
            clock=ports.clock,
        ),
        bodies=BodyMemory(settings.max_open_body_bytes),
        producer=producer,
        instances=Instances(registry=registry, clock=ports.clock),
        metrics=GatewayMetrics(ports.health.metrics),
        clock=ports.clock,
        store=store,
        stop=stop,
        limits=RateLimits(ports.clock),
        broker=broker,
    )


async def _serve(ports: Ports[Settings], gateway: Gateway, broker: Broker, access: Access) -> None:
    """Open the port, then all routes; serve until the gateway is drained."""
    settings, stop = ports.settings, gateway.stop
    instances = gateway.instances
    awaited = AwaitedModels(instances, settings.ready_models)
    watching = MeshWatch(broker, ports.clock)
    opening = Opening(ports.health)
    edge = Edge(opening, keep_alive_s=settings.stream_keep_alive_s)
    application = application_of(gateway, ports.health)
    async with (
        followed(broker, instances),
        forecasts_heard(broker, gateway.fallbacks),
        limits_followed(broker, gateway.limits),
        serve_http(
            with_cors(edge, settings.cors_origins),
            host=settings.host,
            port=settings.port,
            origins=settings.cors_origins,
        ),
        opened_responses(gateway, application) as responses,
    ):
        inner = _with_objects(gateway, application, responses)
        if ports.tracer is not None:
            inner = Traced(inner, ports.tracer)
        if settings.console:
            inner = WithConsole(
                watch=watching,
                broker=broker,
                tenants=gateway.tenants,
                sessions=Sessions(settings.console_token),
                stop=stop,
                front=inner,
            )
        opening.application = inner
        watch = _registry_watch(gateway, instances)
        ports.health.details = lambda: {
            "models": instances.by_model(),
            "registry": msgspec.to_builtins(watch.state),
            "store": state_of(gateway.store),
            "tenants": msgspec.to_builtins(access.policies.state),
            "keys": {"refused": "" if access.keys is None else access.keys.refused},
        }
        log.info("service.started", host=settings.host, port=settings.port)
        ports.health.set("models", awaited.reason())
        ports.health.started()
        reporter = Reporter(broker, lambda: watch.state, access.policies)
        async with asyncio.TaskGroup() as group:
            group.create_task(
                every(GATEWAY_PERIOD_S, reporter.report, stop=stop), name="report-models"
            )
            group.create_task(watch.follow(stop), name="follow-registry")
            group.create_task(access.follow(stop), name="follow-access")
            group.create_task(watching.follow(stop), name="follow-mesh")
            group.create_task(_keep(gateway.store, settings, ports.clock, stop), name="keep-store")
            group.create_task(_run_batches(gateway), name="run-batches")
            await _until_drained(gateway, broker, ports.health, awaited)
            await edge.stop()


def _with_objects(gateway: Gateway, application: Any, responses: Responses | None) -> Any:
    """The application with the routes of stored objects and of other packages."""
    own: tuple[Resource, ...] = (
        FilesResource(gateway),
        RequestsResource(gateway),
        BatchesResource(gateway),
        ResponsesResource(gateway, responses),
    )
    storing = StoredResponses(gateway, responses, application)
    return WithResources(gateway, (*own, *added_resources(gateway, own)), storing)


def _registry_watch(gateway: Gateway, instances: Instances) -> RegistryWatch:
    """Follows the registry's file; names that it or an instance has are expected soon."""
    registry = gateway.registry
    watch = RegistryWatch(
        Path(gateway.settings.registry), registry, AwaitedReleases(instances.releasing)
    )
    registry.is_expected = lambda name: watch.sees(name) or instances.serve(name)
    return watch


@dataclass(frozen=True, slots=True)
class AwaitedReleases:
    """
    Steps about changes of the registry: a name that is used again has to wait until the instances
    have released its former model.
    """

    releasing: Callable[[ModelName], Sequence[InstanceId]]
    """The instances that still release the former model of a name."""

    async def add(self, entry: ModelEntry) -> None:
        """
        Admit a model.

        Raises:
            SettingsError: Instances still serve the former model of the name.
        """
        if holders := self.releasing(entry.name):
            raise SettingsError(f"instances still release the former model: {', '.join(holders)}")

    async def replace(self, entry: ModelEntry) -> None:
        """No-op."""

    async def remove(self, model: ModelName) -> None:
        """No-op."""


async def _keep(store: Store | None, settings: Settings, clock: Clock, stop: asyncio.Event) -> None:
    """
    Follow the store, and do its retention and deliver webhooks in turn with other gateways, until
    *stop*.
    """
    if store is None:
        return
    retention = Retention(store, settings.store)
    period_s = settings.store.retention_period_s
    webhooks = settings.webhooks
    async with Sender(timeout_s=webhooks.timeout_s, allow_private=webhooks.allow_private) as sender:
        deliveries = Deliveries(store, webhooks, sender, clock)
        async with asyncio.TaskGroup() as group:
            group.create_task(store.follow(stop), name="follow-store")
            group.create_task(every(period_s, retention.round, stop=stop), name="retention")
            group.create_task(
                every(WEBHOOKS_PERIOD_S, deliveries.round, stop=stop), name="webhooks"
            )
        for release in (deliveries.release, retention.release):
            with contextlib.suppress(StoreUnavailableError):
                await release()


async def _run_batches(gateway: Gateway) -> None:
    """Run batches until the gateway stops; then other gateways do."""
    if gateway.store is None:
        return
    settings = gateway.settings
    ports = BatchPorts(
        store=gateway.store,
        producer=gateway.producer,
        registry=gateway.registry,
        settings=settings.batches,
        kept=settings.store,
        webhooks=settings.webhooks,
        max_body_bytes=settings.limits.max_body_bytes,
        clock=gateway.clock,
    )
    await BatchRunner(ports).follow(gateway.stop)


async def _until_drained(
    gateway: Gateway, broker: Broker, health: Health, awaited: AwaitedModels
) -> None:
    async def check() -> None:
        health.set("broker", None if broker.connected else "the broker does not answer")
        health.set("models", awaited.reason())

    await every(READINESS_PERIOD_S, check, stop=gateway.stop)
    health.set("drain", "shutting down")
    log.info("service.draining", open=gateway.tenants.num_open)
    is_empty = await drained(
        lambda: not gateway.tenants.num_open,
        lambda: broker.connected,
        timeout_s=gateway.settings.drain_timeout_s,
    )
    if not is_empty:
        log.warning("drain.timed_out", open=gateway.tenants.num_open)
