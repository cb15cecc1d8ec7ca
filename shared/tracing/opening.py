"""Whether and how a process exports traces, by OpenTelemetry's environment variables."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import structlog

from shared.contracts.errors import SettingsError
from shared.tracing.spans import Tracer

log = structlog.get_logger()
SERVICES = ("gateway", "planner", "agent")
"""Services that make spans."""
DISABLED = "OTEL_SDK_DISABLED"
EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SAMPLER, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_SAMPLERS = (
    *("always_on", "always_off", "traceidratio"),
    *("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"),
)
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
"""Protocol of OTLP -> module of its exporter; the extra `otel` has the first one."""


@asynccontextmanager
async def opened_tracer(service: str, environ: Mapping[str, str]) -> AsyncIterator[Tracer | None]:
    """
    Context with the tracer of a service; None if *environ* asks for no traces, or the service makes
    none. At its end, the last spans are exported.

    Args:
        service: Name of the service, e.g. `gateway`.
        environ: Environment of this process, which the exporter reads also.

    Raises:
        SettingsError: A variable has an unknown or unreadable value, or the packages of the extra
            `otel` are not installed.
    """
    if service not in SERVICES or not exports_traces(environ):
        yield None
        return
    check_sampler(environ)
    check_endpoints(environ)
    protocol = next((value for each in PROTOCOLS if (value := environ.get(each))), "http/protobuf")
    tracer = _otel_tracer(f"headway-{service}", protocol)
    log.info("traces.exported", protocol=protocol)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


def exports_traces(environ: Mapping[str, str]) -> bool:
    """
    Return whether *environ* asks for traces: it names an endpoint or the exporter `otlp`.

    Raises:
        SettingsError: It asks for an unknown exporter.
    """
    exporter = environ.get(EXPORTER, "")
    if exporter not in ("", "otlp", "none"):
        raise SettingsError(f"{EXPORTER}={exporter!r} is not supported: must be otlp or none")
    if exporter == "none" or environ.get(DISABLED, "").lower() == "true":
        return False
    return exporter == "otlp" or any(environ.get(each) for each in ENDPOINTS)


def check_sampler(environ: Mapping[str, str]) -> None:
    """
    Check the sampler in *environ*, for which the SDK would use its default.

    Raises:
        SettingsError: The sampler is unknown, or its ratio is not a number from 0 to 1.
    """
    sampler = environ.get(SAMPLER) or "parentbased_always_on"
    if sampler not in _SAMPLERS:
        raise SettingsError(f"{SAMPLER}={sampler!r}: must be one of {', '.join(_SAMPLERS)}")
    if not sampler.endswith("traceidratio"):
        return
    ratio = environ.get(RATIO, "")
    try:
        is_valid = 0.0 <= float(ratio) <= 1.0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise SettingsError(f"{RATIO}={ratio!r}: {sampler} needs a number from 0 to 1")


def check_endpoints(environ: Mapping[str, str]) -> None:
    """
    Check the addresses in *environ*, to which the SDK would fail to send each time.

    Raises:
        SettingsError: One cannot be read.
    """
    for name in ENDPOINTS:
        try:
            urlsplit(environ.get(name, "")).port  # noqa: B018 - raises for an invalid port
        except ValueError as error:
            raise SettingsError(f"{name} is not a URL: {error}") from error


def _otel_tracer(service: str, protocol: str) -> Any:
    """
    A tracer that exports by OTLP.

    Raises:
        SettingsError: The protocol is unknown, or its packages are not installed.
    """
    if protocol not in _EXPORTERS:
        known = " or ".join(_EXPORTERS)
        raise SettingsError(f"{PROTOCOLS[1]}={protocol!r} is not supported: must be {known}")
    try:
        exporters = import_module(_EXPORTERS[protocol])
        otel = import_module("shared.tracing.otel")
    except ImportError as error:
        package = _EXPORTERS[protocol].removesuffix(".trace_exporter").replace(".", "-")
        raise SettingsError(
            f"traces by {protocol} need the package {package}, which is not installed: install "
            f"headway[otel] (http/protobuf), or set {EXPORTER}=none"
        ) from error
    return otel.OtelTracer(service, exporters.OTLPSpanExporter())
