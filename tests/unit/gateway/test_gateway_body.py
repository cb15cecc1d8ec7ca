"""Reading of whole bodies, and the memory that they take."""

from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.body import BodyMemory, RequestBody, declared_bytes
from shared.contracts.base import TenantId
from shared.contracts.errors import CapacityError, ContractError

ACME, BETA, LIMIT = TenantId("acme"), TenantId("beta"), 10


class Client:
    """The `receive` of a client that sends *parts*, and counts those that were read."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts
        self.num_read = 0

    async def receive(self) -> dict[str, Any]:
        part = self._parts[self.num_read]
        self.num_read += 1
        more = self.num_read < len(self._parts)
        return {"type": "http.request", "body": part, "more_body": more}


async def test_a_body_of_the_largest_size_is_read():
    held: list[int] = []
    client = Client(b"12345", b"", b"67890")
    whole = await RequestBody(client.receive, idle_s=60.0).whole(LIMIT, hold=held.append)

    assert whole == b"1234567890"
    assert held == [0, 5, 5, 10]


async def test_reading_ends_with_the_part_that_exceeds_the_limit():
    client = Client(b"12345", b"678901", b"2")
    with pytest.raises(ContractError, match="limit is 10 bytes") as error:
        await RequestBody(client.receive, idle_s=60.0).whole(LIMIT)

    assert (error.value.status, error.value.code, client.num_read) == (413, "body_too_large", 2)


async def test_nothing_is_read_of_a_body_that_is_declared_as_too_large():
    client = Client(b"1")
    with pytest.raises(ContractError, match="limit is 10 bytes") as error:
        await RequestBody(client.receive, idle_s=60.0).whole(LIMIT, declared_bytes=LIMIT + 1)

    assert (error.value.status, client.num_read) == (413, 0)


async def test_nothing_is_read_of_a_declared_body_without_memory():
    client, memory = Client(b"1"), BodyMemory(2 * LIMIT - 1)
    with memory.held(ACME) as hold, pytest.raises(CapacityError):
        await RequestBody(client.receive, idle_s=60.0).whole(LIMIT, declared_bytes=LIMIT, hold=hold)

    assert client.num_read == 0
    assert memory.num_bytes == 0


@pytest.mark.parametrize(
    ("headers", "size"),
    [({}, 0), ({"content-length": "7"}, 7), ({"content-length": "-7"}, 0)],
)
def test_declared_size_is_that_of_the_header(headers: dict[str, str], size: int):
    assert declared_bytes(headers) == size


def test_one_tenant_takes_half_of_the_memory_at_most():
    memory = BodyMemory(100)
    with memory.held(ACME) as first, memory.held(ACME) as second, memory.held(BETA) as other:
        first(30)
        second(20)
        with pytest.raises(CapacityError, match=r"tenant acme may take 50 bytes .* 100 ") as error:
            second(21)
        other(25)
        with pytest.raises(CapacityError):
            other(26)
        num_bytes = memory.num_bytes

    assert error.value.status == 503
    assert num_bytes == 75


def test_sizes_of_one_body_are_not_added():
    memory = BodyMemory(100)
    with memory.held(ACME) as hold:
        for size in (50, 10, 50):
            hold(size)
        num_bytes = memory.num_bytes

    assert num_bytes == 50
    assert memory.num_bytes == 0


@given(
    limit=st.integers(0, 60),
    sizes=st.lists(st.tuples(st.sampled_from([ACME, BETA]), st.integers(0, 30)), max_size=8),
)
def test_bodies_take_no_more_than_the_limit(limit: int, sizes: list[tuple[TenantId, int]]):
    memory, taken = BodyMemory(limit), 0
    with ExitStack() as held:
        for tenant, size in sizes:
            hold = held.enter_context(memory.held(tenant))
            with suppress(CapacityError):
                hold(size)
                taken += size

            assert taken == memory.num_bytes <= limit

    assert memory.num_bytes == 0
