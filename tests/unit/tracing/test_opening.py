"""Whether and how a process exports traces, by the environment variables of OpenTelemetry."""

import subprocess
import sys

import pytest

from shared.contracts.errors import SettingsError
from shared.tracing.opening import check_sampler, exports_traces, opened_tracer

AWAY = "http://127.0.0.1:9"
ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": AWAY}
HTTP_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
SERVICES = """
import asyncio, sys
from services.mesh.embedded import SERVICES
from shared.tracing.opening import opened_tracer

async def main():
    async with opened_tracer("agent", {}) as tracer:
        print(tracer, sorted(name for name in sys.modules if name.startswith("opentelemetry")))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_SERVICE_NAME": "mesh", "OTEL_TRACES_SAMPLER": "always_on"},
        ON | {"OTEL_SDK_DISABLED": "true"},
        ON | {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
async def test_there_are_no_traces_unless_they_are_asked_for(environ: dict[str, str]):
    async with opened_tracer("agent", environ) as tracer:
        assert tracer is None


async def test_service_without_spans_has_no_tracer():
    async with opened_tracer("estimator", ON) as tracer:
        assert tracer is None


@pytest.mark.parametrize(
    "environ",
    [
        ON,
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": AWAY},
        {"OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
def test_an_endpoint_or_the_exporter_asks_for_traces(environ: dict[str, str]):
    assert exports_traces(environ)


def test_services_without_traces_import_nothing_of_opentelemetry():
    ran = subprocess.run(
        [sys.executable, "-c", SERVICES], check=True, capture_output=True, text=True
    )

    assert ran.stdout == "None []\n"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "must be otlp or none"),
        (ON | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "must be http/protobuf or grpc"),
        (ON | {"OTEL_TRACES_SAMPLER": "sometimes"}, "must be one of always_on"),
        (ON | {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, "a number from 0 to 1"),
        (
            ON | {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "10"},
            "a number from 0 to 1",
        ),
    ],
)
async def test_unknown_values_are_errors_of_settings(environ: dict[str, str], says: str):
    with pytest.raises(SettingsError, match=says):
        async with opened_tracer("agent", environ):
            pass


def test_a_ratio_is_checked_only_if_the_sampler_has_one():
    check_sampler({"OTEL_TRACES_SAMPLER": "always_off", "OTEL_TRACES_SAMPLER_ARG": "x"})
    check_sampler({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"})


async def test_missing_packages_are_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, HTTP_EXPORTER, None)

    with pytest.raises(SettingsError, match=r"exporter-otlp-proto-http.*headway\[otel\]"):
        async with opened_tracer("agent", ON):
            pass


@pytest.mark.parametrize("address", ["http://[::1/", "http://host:port/"])
async def test_an_unreadable_endpoint_is_refused_by_name(address: str):
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": address}
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_ENDPOINT is not a URL"):
        async with opened_tracer("agent", environ):
            pass
