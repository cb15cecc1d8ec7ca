"""Answers of simulated engines say so in OpenAI's own field."""

import json

import msgspec
import pytest

from services.gateway.results import with_headway
from shared.contracts.ingress import CallRequest
from shared.contracts.requests import RequestCompleted
from tests.integration.gateway_rig import completed
from tests.queued import MODEL

BODY = CallRequest(
    endpoint="/v1/completions",
    body=msgspec.Raw(b'{"model":"m","prompt":"p"}'),
    model=MODEL,
    events=True,
)


def final_of(engine: str) -> RequestCompleted:
    final = completed(BODY, "hi")
    return msgspec.structs.replace(final, engine=engine)


@pytest.mark.parametrize("written", ["null", '"vllm-0.32-tp1"'])
def test_fingerprint_of_vllm_is_replaced_if_a_simulated_engine_has_answered(written: str):
    text = json.dumps('"system_fingerprint":null')
    body = f'{{"text":{text},"system_fingerprint":{written}}}'.encode()
    simulated = json.loads(with_headway(body, final_of("simulated")))
    real = json.loads(with_headway(body, final_of("vllm")))

    assert simulated["system_fingerprint"] == "headway-simulated"
    assert simulated["text"] == '"system_fingerprint":null'
    assert real["system_fingerprint"] == json.loads(written)
