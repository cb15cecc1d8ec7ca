"""Signals, exit codes, loops and health of a service process."""

import asyncio
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from ops.ports import free_port
from shared.contracts.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerUnavailableError,
    MeshError,
    QueueNotFoundError,
    SettingsError,
)
from shared.runtime.health import Health, serve_health
from shared.runtime.lifecycle import EXIT_NO_BROKER, EXIT_OK, EXIT_USAGE, run_service
from shared.runtime.tasks import every, pause, poll_until

SERVICE = """
import asyncio, sys
from shared.runtime.lifecycle import run_service

async def main(stop):
    print("serving", flush=True)
    await stop.wait()
    print("draining", flush=True)
    try:
        await asyncio.sleep({drain_s})
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
    print("drained", flush=True)

sys.exit(run_service("test", main, limit_s={limit_s}))
"""


def started(*, drain_s: float, limit_s: float | None = None) -> subprocess.Popen[str]:
    """Start a service process and wait until it runs its main."""
    code = SERVICE.format(drain_s=drain_s, limit_s=limit_s)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert line_of(process) == "serving"
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are killed after the test, even if the test fails."""
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_starts_the_drain(
    processes: list[subprocess.Popen[str]], number: signal.Signals
):
    process = started(drain_s=0.0)
    processes.append(process)
    process.send_signal(number)
    assert [line_of(process), line_of(process)] == ["draining", "drained"]
    assert process.wait(60) == EXIT_OK


def test_the_second_signal_cancels_the_service(processes: list[subprocess.Popen[str]]):
    process = started(drain_s=1000.0)
    processes.append(process)
    process.send_signal(signal.SIGTERM)
    assert line_of(process) == "draining"
    process.send_signal(signal.SIGTERM)
    assert line_of(process) == "cancelled"
    assert process.wait(60) == EXIT_OK


def test_an_endless_drain_is_cancelled(processes: list[subprocess.Popen[str]]):
    process = started(drain_s=1000.0, limit_s=0.1)
    processes.append(process)
    process.send_signal(signal.SIGTERM)
    assert [line_of(process), line_of(process)] == ["draining", "cancelled"]
    assert process.wait(60) == EXIT_OK


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, EXIT_OK),
        (SettingsError("x"), EXIT_USAGE),
        (BrokerUnavailableError("x"), EXIT_NO_BROKER),
    ],
)
@pytest.mark.parametrize("grouped", [0, 1, 2])
def test_the_cause_of_the_end_decides_the_exit_code(
    error: Exception | None, code: int, grouped: int
):
    async def main(_stop: asyncio.Event) -> None:
        raised: Exception | None = error
        for _ in range(grouped):
            raised = raised and ExceptionGroup("of tasks", [raised])
        if raised is not None:
            raise raised

    assert run_service("test", main) == code


def test_an_unexpected_exception_is_raised():
    async def main(_stop: asyncio.Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_service("test", main)


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnavailableError("away"),
        BrokerConflictError("another client's"),
        BrokerAccessError("forbidden"),
        QueueNotFoundError("deleted"),
    ],
)
async def test_a_loop_survives_transient_errors_and_ends_with_its_event(error: MeshError):
    stop, calls = asyncio.Event(), []

    async def action() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            stop.set()
        raise error

    await asyncio.wait_for(every(0.0, action, stop=stop), 60)
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("error", [ZeroDivisionError(), SettingsError("no such thing")])
async def test_a_loop_does_not_survive_a_bug_or_wrong_settings(error: Exception):
    async def action() -> None:
        raise error

    with pytest.raises(type(error)):
        await every(0.0, action, stop=asyncio.Event())


async def test_a_pause_ends_with_its_event():
    stop = asyncio.Event()
    assert not await pause(stop, 0.0)
    stop.set()
    assert await asyncio.wait_for(pause(stop, 1000.0), 60)


async def test_polling_stops_at_the_time_limit():
    assert await poll_until(lambda: True, timeout_s=0.0)
    assert not await poll_until(lambda: False, timeout_s=0.0)


async def fetched(port: int, path: str) -> tuple[int, bytes]:
    def get() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    return await asyncio.to_thread(get)


async def test_a_service_is_alive_before_it_is_ready():
    port, health = free_port(), Health(service="planner")
    async with serve_health(health, host="127.0.0.1", port=port):
        assert await fetched(port, "/health") == (200, b'{"status":"ok","service":"planner"}')
        status, body = await fetched(port, "/ready")
        assert (status, msgspec.json.decode(body)) == (
            503,
            {"ready": False, "service": "planner", "reasons": {"start": "starting"}},
        )
        health.started()
        assert (await fetched(port, "/ready"))[0] == 200
        health.set("broker", "away")
        status, body = await fetched(port, "/ready")
        assert (status, msgspec.json.decode(body)["reasons"]) == (503, {"broker": "away"})
        health.set("broker", None)
        assert (await fetched(port, "/ready"))[0] == 200
        assert (await fetched(port, "/metrics"))[0] == 200
        assert (await fetched(port, "/nothing"))[0] == 404


def num_listening() -> int:
    """Number of sockets of this process that listen."""
    opened = psutil.Process().net_connections("tcp")
    return sum(each.status == psutil.CONN_LISTEN for each in opened)


async def test_port_0_starts_no_server():
    before = num_listening()
    async with serve_health(Health(service="x"), host="127.0.0.1", port=0):
        during = num_listening()

    assert during == before


async def test_an_address_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}: Address already in use"):
            async with serve_health(Health(service="x"), host="127.0.0.1", port=port):
                pass
