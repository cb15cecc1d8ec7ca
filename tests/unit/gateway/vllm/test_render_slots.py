"""Slots for calls that are rendered."""

import asyncio
from collections import Counter
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.render_slots import RenderSlots
from shared.contracts.base import TenantId
from shared.contracts.errors import CapacityError

A, B = TenantId("a"), TenantId("b")


class Calls:
    """Calls that hold their slot until `finish`."""

    def __init__(self, slots: RenderSlots) -> None:
        self._slots = slots
        self.begun: list[str] = []
        self.refused: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, tenant: TenantId) -> None:
        self.begin(name, tenant)
        await turns()

    def begin(self, name: str, tenant: TenantId) -> None:
        """Start a call in the next turn of the event loop."""
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._run(name, tenant))

    def cancel(self, name: str) -> None:
        """Cancel a call, which learns of it in the next turn of the event loop."""
        self._tasks[name].cancel()

    async def finish(self, name: str) -> None:
        self._ends[name].set()
        await turns()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self._tasks[name]
        await turns()

    async def _run(self, name: str, tenant: TenantId) -> None:
        try:
            async with self._slots.slot(tenant):
                self.begun.append(name)
                await self._ends[name].wait()
        except CapacityError as error:
            self.refused.append(name if error.status == 503 else f"{name}: {error.status}")


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_tenants_take_turns():
    calls = Calls(RenderSlots(slots=1, max_waiting=10))
    for name, tenant in (("a1", A), ("a2", A), ("a3", A), ("b1", B)):
        await calls.start(name, tenant)
    for name in ("a1", "a2", "b1"):
        await calls.finish(name)
    assert calls.begun == ["a1", "a2", "b1", "a3"]


async def test_tenant_with_most_waiting_calls_loses_its_newest():
    calls = Calls(RenderSlots(slots=1, max_waiting=3))
    for name, tenant in (("a0", A), ("a1", A), ("a2", A), ("a3", A), ("b1", B)):
        await calls.start(name, tenant)
    assert calls.refused == ["a3"]
    for name in ("a0", "a1", "b1"):
        await calls.finish(name)
    assert calls.begun == ["a0", "a1", "b1", "a2"]


async def test_call_that_has_just_left_gives_its_place_to_another():
    """Its task has not run since, so that it is still among those that wait."""
    calls = Calls(RenderSlots(slots=1, max_waiting=2))
    for name in ("a0", "a1", "a2"):
        await calls.start(name, A)
    calls.begin("b1", B)
    calls.cancel("a2")
    await turns()
    for name in ("a0", "a1", "b1"):
        await calls.finish(name)
    await calls.start("a3", A)
    assert calls.begun == ["a0", "a1", "b1", "a3"]
    assert calls.refused == []
    await calls.finish("a3")


async def test_slot_can_be_released_before_the_end_and_only_once():
    slots = RenderSlots(slots=1, max_waiting=1)
    async with slots.slot(A) as release:
        release()
        release()
        async with slots.slot(A):
            calls = Calls(slots)
            await calls.start("waits", B)
            assert calls.begun == []
        await turns()
        assert calls.begun == ["waits"]


@given(
    st.lists(st.tuples(st.sampled_from(["finish", "leave", "a", "b", "c"]), st.integers(0, 50))),
    st.integers(1, 3),
    st.integers(0, 4),
)
async def test_slots_and_waiting_calls_stay_within_their_limits(steps, number, max_waiting):
    slots = RenderSlots(slots=number, max_waiting=max_waiting)
    calls, is_open = Calls(slots), Counter[str]()
    for index, (step, which) in enumerate(steps):
        if step in ("finish", "leave"):
            names = sorted(set(is_open) - set(calls.refused))
            if not names:
                continue
            name = names[which % len(names)]
            if step == "finish" and name not in calls.begun:
                continue
            await (calls.finish(name) if step == "finish" else calls.leave(name))
            del is_open[name]
        else:
            is_open[str(index)] += 1
            await calls.start(str(index), TenantId(step))
        still = set(is_open) - set(calls.refused)
        assert len(still & set(calls.begun)) == min(number, len(still))
        assert slots.num_waiting == len(still - set(calls.begun)) <= max_waiting
    for name in is_open:
        await calls.leave(name)
