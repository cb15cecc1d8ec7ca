"""Bodies at an engine that takes tokens."""

import asyncio
import json
from pathlib import Path

import pytest

from services.agent.backends.base import (
    EngineCall,
    EngineEvent,
    EngineIdentity,
    EngineOutput,
    EngineRequest,
    NewOutput,
    RunEnded,
)
from services.agent.backends.residency import Footprint, ResidencyTable
from services.agent.backends.token_engine import TokenEngine
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import FinishReason, Sampling
from shared.contracts.telemetry import ActivationPath, Capability
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models

CALL = RequestId("call")


class Engine(TokenEngine):
    """An engine that does what a test says."""

    def __init__(self, entry: ModelEntry) -> None:
        none = Footprint(weight_bytes=0, engine_bytes=0)
        table = ResidencyTable({entry.name: none}, warm_bytes=0, prior_s={ActivationPath.COLD: 0.0})
        super().__init__((entry,), table)
        activation = table.activation(entry.name)
        assert activation is not None
        table.activated(activation, 0.0)
        self.begun: list[RequestId] = []
        self.stopped: list[RequestId] = []

    @property
    def identity(self) -> EngineIdentity:
        can = frozenset({Capability.CALLS})
        return EngineIdentity(engine="own", device="cpu", capabilities=can)

    def _require_alive(self) -> None: ...

    def _run(self, request: EngineRequest) -> None:
        self.begun.append(request.request_id)

    def _stop(self, request_id: RequestId) -> None:
        self.stopped.append(request_id)

    def token(self, answer: RequestId, reason: FinishReason | None = None) -> None:
        output = EngineOutput(token_ids=(10,), finish_reason=reason)
        self._report([NewOutput(answer, output)])

    def fail(self, answer: RequestId) -> None:
        self._report([RunEnded(answer, EngineError("no memory"))])


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> ModelEntry:
    models: Path = make_tiny_models(tmp_path_factory.mktemp("models"), weights=False)
    return ModelRegistry.load(models).entry(ModelName("tiny-llama"))


async def asked(entry: ModelEntry, **fields: object) -> tuple[Engine, list[EngineEvent]]:
    """An engine that has begun the answers to a body, and the events that it reports."""
    engine, events = Engine(entry), list[EngineEvent]()
    engine.listen(events.extend)
    body = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 4} | fields).encode()
    engine.submit(
        EngineRequest(
            request_id=CALL,
            model=entry.name,
            prompt=(),
            sampling=Sampling(),
            call=EngineCall(endpoint="/v1/completions", body=body, seed=0),
        )
    )
    while not engine.begun:
        await asyncio.sleep(0)
    return engine, events


async def test_answers_of_a_body_are_runs_whose_tokens_are_those_of_the_call(entry: ModelEntry):
    engine, events = await asked(entry, n=2)
    first, second = engine.begun
    engine.token(first, FinishReason.LENGTH)
    engine.token(second, FinishReason.LENGTH)

    last = events[-1]
    assert isinstance(last, NewOutput)
    assert last.output.response is not None
    assert len(json.loads(last.output.response)["choices"]) == 2
    assert {each.request_id for each in events} == {CALL}


async def test_error_of_one_answer_ends_the_call_and_its_other_answers(entry: ModelEntry):
    engine, events = await asked(entry, n=2)
    first, second = engine.begun
    engine.token(first)
    engine.fail(second)

    last = events[-1]
    assert isinstance(last, RunEnded)
    assert (last.request_id, str(last.error)) == (CALL, "no memory")
    assert engine.stopped == [first]


async def test_cancelled_call_stops_its_answers(entry: ModelEntry):
    engine, events = await asked(entry, n=2)
    engine.abort(CALL)

    assert sorted(engine.stopped) == sorted(engine.begun)
    assert isinstance(events[-1], RunEnded)
