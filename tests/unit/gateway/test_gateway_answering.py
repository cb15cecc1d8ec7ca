"""Answers to clients that read, stall or disconnect."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.gateway import answering
from services.gateway.answering import Answering
from services.gateway.channel import Channel
from services.gateway.metrics import GatewayMetrics
from services.gateway.outcomes import Outcome
from services.gateway.replies import Renderer
from services.gateway.shapes import COMPLETIONS
from shared.contracts.base import RequestId
from shared.producer.effects import NewTokens
from shared.producer.generation import Generation
from tests.clocks import FakeClock
from tests.unit.gateway.rig import MODEL, IntakeRig


async def _cancel(_request_id: RequestId) -> None: ...


async def _never_read(_message: Any) -> None:
    await asyncio.Event().wait()


async def test_client_that_does_not_read_is_dropped(
    intake_rig: IntakeRig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(answering, "LAST_WORD_S", 0.01)
    generation = Generation(RequestId("r"), cancel=_cancel)
    generation.append(NewTokens(offset=0, token_ids=(10,), text="hello"))
    answer = Answering(
        accepted=intake_rig.completion(stream=True),
        renderer=Renderer(COMPLETIONS, request_id="r", model=MODEL, created=0, include_usage=False),
        channel=Channel(_never_read, {}),
        metrics=GatewayMetrics(CollectorRegistry()),
        clock=FakeClock(),
        timeout_s=0.01,
    ).answer(generation)
    assert await asyncio.wait_for(answer, 60) is Outcome.TIMEOUT
