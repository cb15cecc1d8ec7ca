"""Turns of the instances of one agent to pull, on an event loop."""

import asyncio

import pytest

from services.agent.attached.shared_turns import Pulled, SharedTurns
from shared.contracts.telemetry import Capability
from solver.instance.events import PullEnded, PullOutcome
from tests.unit.instance.driver import Driver

QUEUE = "lane"


def nothing(outcome: PullOutcome) -> PullEnded:
    return PullEnded(queue=QUEUE, outcome=outcome, asked_at=0.0)


class Pulls:
    """Pulls from one queue that end when the test says so."""

    def __init__(self, number: int) -> None:
        self.turns = SharedTurns()
        self.instances = [
            Driver(capabilities=frozenset({Capability.CALLS})).instance for _ in range(number)
        ]
        self.open: list[asyncio.Future[Pulled]] = []

    def begin(self, number: int) -> asyncio.Task[Pulled]:
        return asyncio.create_task(self.turns.pull(self.instances[number], QUEUE, self._pull))

    async def _pull(self, _queue: str) -> Pulled:
        self.open.append(asyncio.get_running_loop().create_future())
        return await self.open[-1]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_one_empty_answer_ends_the_pulls_that_wait() -> None:
    pulls = Pulls(4)
    tasks = [pulls.begin(number) for number in range(4)]
    await pulls.settle()
    assert len(pulls.open) == 2
    empty = nothing(PullOutcome.EMPTY)
    pulls.open[0].set_result(empty)
    await pulls.settle()

    assert [task.done() and task.result() is empty for task in tasks] == [True, False, True, True]
    assert len(pulls.open) == 2
    tasks[1].cancel()


@pytest.mark.parametrize("outcome", [PullOutcome.UNREACHABLE, PullOutcome.DEAD_LETTERED])
async def test_result_of_one_instance_alone_lets_others_pull(outcome: PullOutcome) -> None:
    pulls = Pulls(3)
    tasks = [pulls.begin(number) for number in range(3)]
    await pulls.settle()
    pulls.open[0].set_result(nothing(outcome))
    await pulls.settle()

    assert len(pulls.open) == 3
    for task in tasks:
        task.cancel()


async def test_cancelled_pulls_leave_their_turns_to_others() -> None:
    pulls = Pulls(3)
    tasks = [pulls.begin(number) for number in range(3)]
    await pulls.settle()
    for task in tasks[:2]:
        task.cancel()
    await pulls.settle()
    assert len(pulls.open) == 3

    found = nothing(PullOutcome.EMPTY)
    pulls.open[2].set_result(found)
    assert await tasks[2] is found


async def test_turn_that_comes_to_a_cancelled_pull_goes_to_the_next() -> None:
    pulls = Pulls(4)
    tasks = [pulls.begin(number) for number in range(4)]
    await pulls.settle()
    tasks[2].cancel()
    pulls.open[0].set_exception(RuntimeError("broken"))
    await pulls.settle()

    assert len(pulls.open) == 3
    with pytest.raises(RuntimeError):
        await tasks[0]
    tasks[1].cancel()
    tasks[3].cancel()
