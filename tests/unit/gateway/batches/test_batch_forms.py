"""What the mesh can serve, and the requests of the lines."""

import json
from typing import Any

import msgspec
import pytest

from services.gateway.batches.forms import LineTerms, check_line, message_of
from services.gateway.batches.lines import BatchLine
from shared.api.calls import call_fields
from shared.contracts.base import ModelName, RequestId, TenantId
from shared.contracts.errors import ContractError
from shared.contracts.ingress import CallRequest
from shared.contracts.models import ModelEntry, ModelTask
from shared.contracts.qos import Importance, Slo
from shared.models.registry import ModelRegistry
from tests.clocks import NOW

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"


def own(name: str, task: ModelTask = "generate") -> ModelEntry:
    return ModelEntry(name=ModelName(name), path="", architecture="", max_model_len=512, task=task)


REGISTRY = ModelRegistry(
    (
        own("text"),
        own("vectors", "embed"),
        own("classes", "classify"),
        ModelEntry(name=ModelName("attached"), takes="bodies", max_model_len=512),
    )
)


def check(endpoint: str, model: str, **fields: Any) -> None:
    check_line(REGISTRY, endpoint, call_fields(json.dumps({"model": model} | fields).encode()))


@pytest.mark.parametrize(
    ("endpoint", "model"),
    [
        (CHAT, "text"),
        (RESPONSES, "text"),
        (EMBEDDINGS, "vectors"),
        (CHAT, "attached"),
        (EMBEDDINGS, "attached"),
    ],
)
def test_lines_are_for_models_that_perform_the_task_of_the_endpoint(endpoint: str, model: str):
    check(endpoint, model)


@pytest.mark.parametrize(
    ("endpoint", "model", "code", "param"),
    [
        (EMBEDDINGS, "text", "unsupported_task", "body.model"),
        (EMBEDDINGS, "classes", "unsupported_task", "body.model"),
        (CHAT, "vectors", "unsupported_task", "body.model"),
        (RESPONSES, "classes", "unsupported_task", "body.model"),
        (EMBEDDINGS, "none", "model_not_found", "model"),
    ],
)
def test_other_lines_are_refused_with_the_field(endpoint: str, model: str, code: str, param: str):
    with pytest.raises(ContractError) as refused:
        check(endpoint, model)

    assert (refused.value.code, refused.value.param) == (code, param)


def test_results_are_not_streamed():
    with pytest.raises(ContractError) as refused:
        check(EMBEDDINGS, "vectors", stream=True)

    assert refused.value.param == "body.stream"


def test_line_for_embeddings_is_a_call_with_the_body_as_it_is():
    body = b'{"model": "vectors", "input": ["one", "two"], "encoding_format": "base64"}'
    terms = LineTerms(
        tenant=TenantId("acme"),
        request_id=RequestId("batch-000000"),
        endpoint=EMBEDDINGS,
        slo=Slo(ttlt_s=60.0),
        expires_at=NOW + 100.0,
        now=NOW,
    )
    message = message_of(BatchLine(custom_id="c0", body=body), terms)

    assert message == CallRequest(
        endpoint=EMBEDDINGS,
        body=msgspec.Raw(body),
        id="batch-000000",
        tenant="acme",
        slo=Slo(ttlt_s=60.0),
        importance=Importance.LOW,
        arrived_at=NOW,
        expires_at=NOW + 100.0,
    )
