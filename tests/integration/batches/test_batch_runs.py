"""
Batches over a scripted mesh: every line is in one of the result files, once, whatever happens.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.batches.publishing import BatchPorts
from services.gateway.batches.runner import BatchRunner
from shared.contracts.errors import BrokerUnavailableError, StoreUnavailableError
from shared.contracts.qos import Importance
from shared.contracts.requests import Final
from shared.store.ids import line_request_id
from shared.store.objects.batches import BatchStatus, StoredBatch
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.brokers import eventually
from tests.integration.batches.scripted_mesh import (
    WEBHOOK,
    Body,
    ScriptedMesh,
    a_line,
    completed,
    failed,
    ports_of,
    run_on,
    submitted,
)
from tests.stores import ACME, content_of, open_store

NUM_CUTS = 5


@pytest.fixture
def url() -> None:
    """SQLite: the databases have other tests."""


@pytest.fixture
async def mesh(settings: StoreSettings) -> AsyncIterator[ScriptedMesh]:
    async with open_store(settings) as store:
        await store.check()
        yield ScriptedMesh(store)


@pytest.fixture
def ports(mesh: ScriptedMesh, settings: StoreSettings) -> BatchPorts:
    return ports_of(mesh, settings)


@contextlib.asynccontextmanager
async def running(ports: BatchPorts) -> AsyncIterator[asyncio.Event]:
    """Context in which a gateway's runner works; the event stops it."""
    stop = asyncio.Event()
    following = asyncio.create_task(BatchRunner(ports).follow(stop))
    try:
        yield stop
    finally:
        stop.set()
        await following


async def ended(store: Store, batch: StoredBatch) -> StoredBatch:
    """The batch when it has ended and its lines have no rows any more."""
    found = await over(store, batch)
    ids = [line_request_id(batch.id, number) for number in range(found.num_lines)]

    async def is_clean() -> bool:
        return not await store.requests.states(batch.tenant, ids)

    await eventually(is_clean)
    return found


async def over(store: Store, batch: StoredBatch) -> StoredBatch:
    """The batch when it has ended."""
    found = batch

    async def is_over() -> bool:
        nonlocal found
        row = await store.batches.get(batch.tenant, batch.id)
        assert row is not None
        found = row
        return not row.is_open

    await eventually(is_over)
    return found


async def results(store: Store, batch: StoredBatch) -> tuple[list[Any], list[Any]]:
    """Lines of the output and of the error file."""
    found: list[list[Any]] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        file = None if file_id is None else await store.files.get(batch.tenant, file_id)
        content = b"" if file is None else await content_of(store, file)
        assert file is None or (file.purpose, file.num_bytes) == ("batch_output", len(content))
        found.append([json.loads(line) for line in content.splitlines()])
    return found[0], found[1]


def custom_ids(lines: list[Any]) -> list[str]:
    return [line["custom_id"] for line in lines]


def codes(lines: list[Any]) -> list[str]:
    return [
        line["error"]["code"] if line["error"] else line["response"]["body"]["error"]["code"]
        for line in lines
    ]


async def test_a_batch_has_a_result_for_each_line_in_order(mesh: ScriptedMesh, ports: BatchPorts):
    batch = await submitted(mesh.store, b"".join(map(a_line, range(80))))
    async with running(ports):
        found = await ended(mesh.store, batch)
    output, errors = await results(mesh.store, found)

    assert found.status is BatchStatus.COMPLETED
    assert (found.num_lines, found.num_completed, found.num_failed) == (80, 80, 0)
    assert custom_ids(output) == [f"c{number}" for number in range(80)]
    assert [line["response"]["body"]["choices"][0]["message"]["content"] for line in output] == [
        f"text {number}" for number in range(80)
    ]
    assert (errors, found.error_file_id) == ([], None)
    assert set(mesh.published.values()) == {1}
    assert found.in_progress_at is not None
    assert found.finalizing_at is not None


@pytest.mark.parametrize(
    ("content", "kind"), [(a_line(0), "batch.completed"), (b"", "batch.failed")]
)
async def test_the_end_of_a_batch_is_an_event_for_webhooks(
    mesh: ScriptedMesh, ports: BatchPorts, content: bytes, kind: str
):
    batch = await submitted(mesh.store, content)
    async with running(ports):
        await ended(mesh.store, batch)
    [delivery] = await mesh.store.deliveries.due(limit=10, limit_per_url=10)

    assert (delivery.type, delivery.url, delivery.tenant) == (kind, WEBHOOK.url, ACME)
    assert json.loads(delivery.payload)["data"] == {"id": batch.id}


async def test_lines_carry_the_tenant_and_the_end_of_the_window(
    mesh: ScriptedMesh, ports: BatchPorts
):
    own = {"slo": {"ttft_s": 1.0}, "importance": "high"}
    lines = a_line(0) + a_line(1, **own)
    batch = await submitted(mesh.store, lines, window_s=100.0)
    async with running(ports):
        await ended(mesh.store, batch)
    plain, demanding = (mesh.bodies[line_request_id(batch.id, number)] for number in range(2))

    assert plain.tenant == demanding.tenant == ACME
    assert plain.expires_at == demanding.expires_at == batch.expires_at
    assert plain.slo is not None
    assert plain.slo.deadline_at == pytest.approx(batch.expires_at - 10.0)
    assert plain.importance is Importance.LOW
    assert (demanding.slo, demanding.importance) == (None, None)


async def test_targets_of_the_batch_replace_the_deadline(mesh: ScriptedMesh, ports: BatchPorts):
    batch = await submitted(mesh.store, a_line(0), slo='{"ttlt_s":9.0}')
    async with running(ports):
        await ended(mesh.store, batch)
    [body] = mesh.bodies.values()

    assert body.slo is not None
    assert (body.slo.ttlt_s, body.slo.deadline_at) == (9.0, None)


async def test_invalid_and_refused_lines_are_lines_of_the_error_file(
    mesh: ScriptedMesh, ports: BatchPorts
):
    def script(body: Body, _number: int) -> Final:
        is_bad = (body.id or "").endswith("-000005")
        return failed(body, param="temperature") if is_bad else completed(body)

    mesh.script = script
    content = b"".join(
        [
            a_line(0),
            b"no json\n",
            a_line(0),
            a_line(3, stream=True),
            a_line(4, model="unknown"),
            a_line(5),
            a_line(6, model="vectors"),
            b'{"custom_id": "c7", "method": "POST", "url": "/v1/other", "body": {}}',
        ]
    )
    batch = await submitted(mesh.store, content)
    async with running(ports):
        found = await ended(mesh.store, batch)
    output, errors = await results(mesh.store, found)

    assert (found.num_lines, found.num_completed, found.num_failed) == (8, 1, 7)
    assert custom_ids(output) == ["c0"]
    assert custom_ids(errors) == [None, "c0", "c3", "c4", "c5", "c6", "c7"]
    assert codes(errors) == [
        "invalid_json",
        "duplicate_custom_id",
        "invalid_request",
        "model_not_found",
        "bad",
        "unsupported_task",
        "invalid_request",
    ]
    assert errors[4]["response"]["status_code"] == 400
    assert errors[4]["response"]["body"]["error"]["param"] == "temperature"
    assert [line["response"] for line in errors if line is not errors[4]] == [None] * 6


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "empty_file"), (b"a\nb\n", "invalid_json_line")]
)
async def test_a_file_that_has_no_requests_fails_the_batch(
    mesh: ScriptedMesh, ports: BatchPorts, content: bytes, code: str
):
    # An upload without content has no body; one byte of white space is the shortest one.
    batch = await submitted(mesh.store, content or b"\n")
    async with running(ports):
        found = await ended(mesh.store, batch)

    assert found.status is BatchStatus.FAILED
    assert json.loads(found.errors or "")[0]["code"] == code
    assert (found.output_file_id, found.error_file_id) == (None, None)


async def test_a_lost_input_fails_the_batch(mesh: ScriptedMesh, ports: BatchPorts):
    batch = await submitted(mesh.store, a_line(0))
    await mesh.store.bodies.remove(batch.input_body)
    async with running(ports):
        found = await ended(mesh.store, batch)

    assert found.status is BatchStatus.FAILED
    assert json.loads(found.errors or "")[0]["code"] == "input_file_lost"


async def test_refusals_for_load_are_published_again_and_are_no_results(
    mesh: ScriptedMesh, ports: BatchPorts
):
    def script(body: Body, number: int) -> Final:
        if number == 1 and (body.id or "").endswith(("1", "2", "3")):
            return failed(body, status=429, code="rate_limit_exceeded", retry_after_s=0.01)
        return completed(body)

    mesh.script = script
    batch = await submitted(mesh.store, b"".join(map(a_line, range(20))))
    async with running(ports):
        found = await ended(mesh.store, batch)
    output, _ = await results(mesh.store, found)

    assert found.num_completed == 20
    assert custom_ids(output) == [f"c{number}" for number in range(20)]
    assert sorted(mesh.published.values()) == [1] * 14 + [2] * 6


async def test_a_window_that_ends_leaves_partial_files(mesh: ScriptedMesh, ports: BatchPorts):
    def script(body: Body, _number: int) -> Final | None:
        return completed(body) if (body.id or "").endswith("0") else None

    mesh.script = script
    batch = await submitted(mesh.store, b"".join(map(a_line, range(300))), window_s=3.0)
    async with running(ports_of(mesh, ports.kept, max_outstanding=100, max_waiting=100)):
        found = await ended(mesh.store, batch)
    output, errors = await results(mesh.store, found)

    assert found.status is BatchStatus.EXPIRED
    assert (found.num_completed, found.num_failed) == (len(output), 300 - len(output))
    assert 0 < len(output) <= 30
    assert set(codes(errors)) == {"batch_expired"}
    assert sorted(custom_ids(output) + custom_ids(errors)) == sorted(f"c{n}" for n in range(300))
    assert all(line["response"] is None for line in errors)
    assert len(mesh.published) < 300
    assert mesh.cancelled


async def test_a_line_that_the_mesh_ends_with_the_window_has_expired(
    mesh: ScriptedMesh, ports: BatchPorts
):
    mesh.script = run_on
    batch = await submitted(mesh.store, a_line(0), window_s=2.0)
    async with running(ports):
        await eventually(lambda: bool(mesh.bodies))
        [body] = mesh.bodies.values()
        await asyncio.sleep(max(0.0, batch.expires_at - await mesh.store.database.time() - 0.2))
        await mesh.end(ACME, failed(body, status=504, code="deadline_expired"))
        found = await ended(mesh.store, batch)
    _, errors = await results(mesh.store, found)

    assert found.status is BatchStatus.EXPIRED
    assert codes(errors) == ["batch_expired"]


async def test_a_line_s_own_end_is_a_result(mesh: ScriptedMesh, ports: BatchPorts):
    mesh.script = lambda body, _: failed(body, status=504, code="deadline_expired")
    batch = await submitted(mesh.store, a_line(0, ttl_s=1.0))
    async with running(ports):
        found = await ended(mesh.store, batch)
    _, errors = await results(mesh.store, found)

    assert found.status is BatchStatus.COMPLETED
    assert errors[0]["response"]["status_code"] == 504


async def test_a_cancelled_batch_keeps_what_has_ended(mesh: ScriptedMesh, ports: BatchPorts):
    mesh.script = lambda body, _: completed(body) if (body.id or "").endswith("7") else None
    batch = await submitted(mesh.store, b"".join(map(a_line, range(100))))
    async with running(ports):

        async def has_result() -> bool:
            row = await mesh.store.batches.get(ACME, batch.id)
            return row is not None and row.num_completed > 0

        await eventually(has_result)
        await mesh.store.batches.cancel(ACME, batch.id)
        found = await ended(mesh.store, batch)
    output, errors = await results(mesh.store, found)

    assert found.status is BatchStatus.CANCELLED
    assert output
    assert set(codes(errors)) == {"batch_cancelled"}
    assert sorted(custom_ids(output) + custom_ids(errors)) == sorted(f"c{n}" for n in range(100))


async def test_a_cancelled_batch_cancels_lines_of_a_chunk_that_failed_in_part(
    mesh: ScriptedMesh, ports: BatchPorts, monkeypatch: pytest.MonkeyPatch
):
    mesh.script = run_on
    publish = mesh.publish_stored

    async def publish_the_first(body: Body, *, digest: str) -> None:
        if int((body.id or "").rpartition("-")[2]) >= 3:
            raise BrokerUnavailableError("away")
        await publish(body, digest=digest)

    monkeypatch.setattr(mesh, "publish_stored", publish_the_first)
    batch = await submitted(mesh.store, b"".join(map(a_line, range(20))))
    async with running(ports):
        await eventually(lambda: len(mesh.published) == 3)
        await mesh.store.batches.cancel(ACME, batch.id)
        found = await ended(mesh.store, batch)

    assert found.status is BatchStatus.CANCELLED
    assert len(mesh.published) == 3
    assert mesh.cancelled >= mesh.published.keys()


async def test_a_batch_that_is_cancelled_without_a_runner_cancels_its_lines(
    mesh: ScriptedMesh, ports: BatchPorts
):
    mesh.script = run_on
    batch = await submitted(mesh.store, b"".join(map(a_line, range(20))))

    async def has_noted_all() -> bool:
        row = await mesh.store.batches.get(ACME, batch.id)
        return row is not None and row.submitted_lines == 20

    async with running(ports):
        await eventually(has_noted_all)
    await mesh.store.batches.cancel(ACME, batch.id)
    async with running(ports):
        found = await ended(mesh.store, batch)

    assert found.status is BatchStatus.CANCELLED
    assert mesh.cancelled == mesh.published.keys()


async def test_a_cancelled_batch_cancels_lines_of_a_chunk_that_was_not_noted(
    mesh: ScriptedMesh, ports: BatchPorts, monkeypatch: pytest.MonkeyPatch
):
    """A gateway ended after it had published a chunk and before the store had the cursor."""
    mesh.script = run_on
    batch = await submitted(mesh.store, b"".join(map(a_line, range(20))))

    async def move_cursor(*_: object) -> None:
        raise StoreUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(mesh.store.batches, "move_cursor", move_cursor)
        async with running(ports):
            await eventually(lambda: len(mesh.published) == 20)
    await mesh.store.batches.cancel(ACME, batch.id)
    async with running(ports):
        found = await ended(mesh.store, batch)

    assert found.status is BatchStatus.CANCELLED
    assert mesh.cancelled == mesh.published.keys()


async def test_takeovers_at_any_time_lose_and_repeat_nothing(
    mesh: ScriptedMesh, settings: StoreSettings
):
    """A runner is cancelled in the middle again and again, and another one continues."""

    def script(body: Body, number: int) -> Final | None:
        line = int((body.id or "").rpartition("-")[2])
        if line % 10 == 3 and number == 1:
            return failed(body, status=429, code="over_capacity", retry_after_s=0.01)
        if line in {4, 14, 24} and number == 1:
            return None  # it ends only after a takeover, which publishes it again
        return failed(body) if line % 10 == 5 else completed(body)

    mesh.script = script
    batch = await submitted(mesh.store, b"".join(map(a_line, range(200))))
    cut, next_cut = asyncio.Event(), 10

    def on_publish(total: int) -> None:
        if total >= next_cut:
            cut.set()

    mesh.on_publish = on_publish
    slow = {"min_waiting": 8, "max_waiting": 16, "max_outstanding": 16}
    for _ in range(NUM_CUTS):
        following = asyncio.create_task(
            BatchRunner(ports_of(mesh, settings, **slow)).follow(asyncio.Event())
        )
        waiting = asyncio.create_task(cut.wait())
        await asyncio.wait([waiting], timeout=60.0)
        waiting.cancel()
        assert cut.is_set()
        cut.clear()
        next_cut = mesh.published.total() + 30
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    async with running(ports_of(mesh, settings)):
        # Rows that a cut between the end and the clean-up leaves expire by themselves.
        found = await over(mesh.store, batch)
    output, errors = await results(mesh.store, found)

    assert found.status is BatchStatus.COMPLETED
    assert sorted(custom_ids(output) + custom_ids(errors)) == sorted(f"c{n}" for n in range(200))
    assert custom_ids(errors) == [f"c{number}" for number in range(200) if number % 10 == 5]
    assert (found.num_completed, found.num_failed) == (180, 20)


async def test_a_runner_without_its_lease_leaves_the_batch_to_another(
    mesh: ScriptedMesh, settings: StoreSettings
):
    mesh.script = run_on
    batch = await submitted(mesh.store, b"".join(map(a_line, range(10))))
    async with running(ports_of(mesh, settings)):
        await eventually(lambda: len(mesh.published) == 10)
        # The other one takes the lease as if the first had been stopped for long.
        [unowned] = await stolen(mesh.store, batch)
        mesh.script = lambda body, _: completed(body)
        async with running(ports_of(mesh, settings)):
            found = await ended(mesh.store, batch)
    output, _ = await results(mesh.store, found)

    assert unowned.id == batch.id
    assert custom_ids(output) == [f"c{number}" for number in range(10)]


async def stolen(store: Store, batch: StoredBatch) -> list[StoredBatch]:
    """End the lease of a batch behind its holder's back; the batches without a runner."""
    from sqlalchemy import update  # noqa: PLC0415 - only this test writes a table by itself

    from shared.store.schema import leases  # noqa: PLC0415 - as above

    async with store.database.write() as connection:
        await connection.execute(
            update(leases)
            .where(leases.c.name == f"batch:{batch.id}")
            .values(until=0.0, token=leases.c.token + 1)
        )
    return await store.batches.without_runner(limit=9)


async def test_a_batch_waits_while_the_broker_is_away(mesh: ScriptedMesh, ports: BatchPorts):
    mesh.is_away = True
    batch = await submitted(mesh.store, b"".join(map(a_line, range(5))))
    async with running(ports):

        async def has_begun() -> bool:
            row = await mesh.store.batches.get(ACME, batch.id)
            return row is not None and row.status is BatchStatus.IN_PROGRESS

        await eventually(has_begun)
        await eventually(lambda: mesh.num_refused > 0)
        mesh.is_away = False
        found = await ended(mesh.store, batch)

    assert found.num_completed == 5
    assert set(mesh.published.values()) == {1}


async def test_a_stopped_gateway_leaves_its_batches_at_once(
    mesh: ScriptedMesh, settings: StoreSettings
):
    mesh.script = run_on
    batch = await submitted(mesh.store, a_line(0))
    async with running(ports_of(mesh, settings, lease_s=600.0)):
        await eventually(lambda: bool(mesh.published))
    left = await mesh.store.batches.without_runner(limit=9)

    assert [each.id for each in left] == [batch.id]
