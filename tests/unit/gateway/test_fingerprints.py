"""Answers of simulated engines say so in OpenAI's own field."""

import json

import msgspec
import pytest

from services.gateway.replies import Renderer, with_headway
from services.gateway.shapes import COMPLETIONS
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import RequestCompleted
from tests.integration.gateway_rig import completed
from tests.queued import MODEL


def final_of(engine: str) -> RequestCompleted:
    final = completed(InferenceRequest(model=MODEL, prompt="p"), "hi")
    return msgspec.structs.replace(final, engine=engine)


@pytest.mark.parametrize("engine", ["simulated", "vllm"])
def test_answers_of_the_light_front_name_the_engine(engine: str):
    renderer = Renderer(COMPLETIONS, request_id="r", model=MODEL, created=0, include_usage=True)
    whole = json.loads(renderer.whole(final_of(engine)))
    events = renderer.closing(final_of(engine)).decode().split("\n\n")
    last = json.loads(events[0].removeprefix("data: "))

    assert whole["system_fingerprint"] == f"headway-{engine}"
    assert last["system_fingerprint"] == f"headway-{engine}"


@pytest.mark.parametrize("written", ["null", '"vllm-0.32-tp1"'])
def test_fingerprint_of_vllm_is_replaced_if_a_simulated_engine_has_answered(written: str):
    text = json.dumps('"system_fingerprint":null')
    body = f'{{"text":{text},"system_fingerprint":{written}}}'.encode()
    simulated = json.loads(with_headway(body, [final_of("simulated")]))
    real = json.loads(with_headway(body, [final_of("vllm")]))

    assert simulated["system_fingerprint"] == "headway-simulated"
    assert simulated["text"] == '"system_fingerprint":null'
    assert real["system_fingerprint"] == json.loads(written)
