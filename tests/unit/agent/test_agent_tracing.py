"""Spans of requests on an agent."""

from pathlib import Path

import pytest
import structlog

from shared.contracts.requests import FinishReason
from shared.models.registry import ModelRegistry
from shared.tracing.context import context_of
from tests.agents.rig import REPLY, RESUME, open_agent
from tests.queued import a_request
from tests.tracing.spans import TRACE, TRACE_ID, UNSAMPLED, Traces, ids

pytestmark = pytest.mark.virtual_time

STAY = "text_completion tiny-llama"
REQUEST = a_request("r", reply_to=REPLY, traceparent=TRACE.traceparent, tracestate=TRACE.tracestate)


async def test_each_hop_has_a_wait_and_a_stay_in_the_trace_of_the_request(
    registry: ModelRegistry, registry_path: Path
):
    traces = Traces()
    async with open_agent(registry, registry_path, tracer=traces.tracer) as rig:
        await rig.running(REQUEST)
        rig.engine.emit("r", 20, 21)
        evicted = await rig.evicted("r")
        await rig.running(evicted)
        rig.engine.emit("r", 22, finish=FinishReason.LENGTH)
        with structlog.testing.capture_logs() as logs:
            await rig.final()
            await rig.settled()
    spans = traces.spans()

    assert [span.name for span in spans] == ["wait", STAY, "wait", STAY]
    assert {ids(span) for span in spans} == {(TRACE_ID, TRACE.traceparent[36:52])}
    values = [dict(span.attributes or {}) for span in spans]
    assert [each["headway.hop"] for each in values] == [0, 0, 1, 1]
    assert [each["headway.instance"] for each in values] == ["i1"] * 4
    first, last = spans[1], spans[3]
    assert [event.name for event in first.events] == ["submitted", "first_token", "evicted"]
    assert [event.name for event in last.events] == ["resumed"]
    assert values[1]["headway.outcome"] == "evicted"
    assert values[3]["gen_ai.usage.output_tokens"] == 3
    assert values[3]["gen_ai.response.finish_reasons"] == ("length",)
    completed = next(each for each in logs if each["event"] == "request.completed")
    assert completed["trace_id"] == TRACE_ID


async def test_context_travels_with_the_evicted_request(
    registry: ModelRegistry, registry_path: Path
):
    async with open_agent(registry, registry_path) as rig:
        await rig.running(REQUEST)
        evicted = await rig.evicted("r", RESUME)

    assert context_of(evicted) == TRACE


async def test_failed_request_has_its_code_and_no_text_of_the_error(
    registry: ModelRegistry, registry_path: Path
):
    traces = Traces()
    async with open_agent(registry, registry_path, tracer=traces.tracer) as rig:
        await rig.running(REQUEST)
        rig.engine.refuse("r")
        await rig.final()
        await rig.settled()
    stay = traces.by_name()[STAY]

    assert dict(stay.attributes or {})["error.type"] == "engine_refused"
    assert "the engine says no" not in stay.to_json()


@pytest.mark.parametrize("traceparent", [None, UNSAMPLED.traceparent])
async def test_request_that_is_not_sampled_has_no_span_and_no_trace_id_in_logs(
    registry: ModelRegistry, registry_path: Path, traceparent: str | None
):
    traces = Traces()
    async with open_agent(registry, registry_path, tracer=traces.tracer) as rig:
        await rig.running(a_request("r", reply_to=REPLY, traceparent=traceparent))
        rig.engine.emit("r", 20, finish=FinishReason.LENGTH)
        with structlog.testing.capture_logs() as logs:
            await rig.final()
            await rig.settled()

    assert traces.spans() == []
    completed = next(each for each in logs if each["event"] == "request.completed")
    assert "trace_id" not in completed
