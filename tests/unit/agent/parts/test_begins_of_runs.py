"""Runs that end while they begin."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ops.sim.virtual_time import LoopClock
from services.agent.backends.base import EngineBackend, EngineIdentity, EngineRequest
from services.agent.runs import Runs
from services.agent.servable import ServableModels
from shared.contracts.base import RequestId, RunId
from shared.contracts.qos import Slo
from shared.contracts.requests import ModelRef, QueuedRequest
from shared.models.registry import ModelRegistry
from solver.instance.commands import Submit
from solver.instance.events import Ended, Event, Rendered, RunEnd
from tests.agents.rig import I1
from tests.queued import MODEL, a_request

pytestmark = pytest.mark.virtual_time

RUN = RunId("run")


class Engine:
    """An engine that stores the runs that it gets."""

    identity = EngineIdentity(engine="scripted", device="paper")

    def __init__(self) -> None:
        self.submitted: list[EngineRequest] = []

    def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request)

    def abort(self, _request_id: RequestId) -> None:
        """No run ends early here."""


class Beginning:
    """
    Runs with all that they need.

    Args:
        models: Models of the agent.
    """

    def __init__(self, models: ServableModels) -> None:
        self.engine = Engine()
        self.events: list[Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.ends_when_rendered = False
        """True: the instance ends each run when it knows the length of its prompt."""
        self.runs = Runs(
            engine=cast("EngineBackend", self.engine),
            models=models,
            outbox=cast("Any", SimpleNamespace()),
            stored_starts=cast("Any", SimpleNamespace()),
            instance_id=I1,
            report=self._report,
            prefilled=lambda _prefill: None,
            spawn=self._spawn,
            clock=LoopClock(),
        )

    def submit(self, request: QueuedRequest) -> None:
        self.runs.submit(
            Submit(
                number=1,
                request=request,
                run_id=RUN,
                slo=Slo(),
                room_tokens=10_000,
                checkpointed=False,
            )
        )

    def _report(self, event: Event) -> None:
        self.events.append(event)
        if self.ends_when_rendered and isinstance(event, Rendered):
            self.runs.abort(event.run_id)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))


@pytest.fixture
def models(registry: ModelRegistry) -> ServableModels:
    return ServableModels([registry.entry(MODEL)])


@pytest.mark.parametrize("ends", [False, True])
async def test_run_that_is_ended_when_its_prompt_is_known_never_reaches_the_engine(
    models: ServableModels, *, ends: bool
):
    """Its request has reached its end while a thread made the tokens of the prompt."""
    beginning = Beginning(models)
    beginning.ends_when_rendered = ends
    beginning.submit(a_request("r", prompt="the " * 1100))
    await asyncio.gather(*beginning.tasks)

    assert len(beginning.engine.submitted) == (not ends)
    if ends:
        rendered, ended = beginning.events
        assert isinstance(rendered, Rendered)
        assert isinstance(ended, Ended)
        assert ended.how is RunEnd.ABORTED


async def test_run_that_ends_while_it_waits_for_its_adapter_needs_its_model_no_more(
    models: ServableModels,
):
    beginning = Beginning(models)
    beginning.submit(a_request("r", model=ModelRef(name="sql", base=MODEL, adapter="sql")))
    await asyncio.sleep(0)  # the run waits
    beginning.runs.abort(RUN)
    models.remove(MODEL)
    await asyncio.gather(*beginning.tasks)

    assert [type(event) for event in beginning.events] == [Ended]
    assert beginning.engine.submitted == []
