"""Every door that refuses a misspelt target names the targets that there are."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.gateway.batches.objects import parse_request
from shared.api.calls import call_body, call_fields
from shared.client.bodies import body_of
from shared.contracts.base import SLO_FIELDS, Decoder
from shared.contracts.errors import ContractError
from shared.contracts.ingress import RequestedSlo, RequestedTargets

BODY = {"model": "m", "prompt": "x"}
_targets: Decoder[RequestedTargets] = Decoder(RequestedTargets)


def test_named_targets_are_those_of_requests():
    assert RequestedSlo.__struct_fields__ == SLO_FIELDS


@pytest.mark.parametrize(
    "read",
    [
        lambda body: call_body(call_fields(body)),
        lambda body: body_of(msgspec.json.decode(body)),
        parse_request,
        _targets,
    ],
    ids=["calls and batch lines", "Python client", "batches", "AMQP"],
)
def test_a_misspelt_target_is_answered_with_the_targets(read: Callable[[bytes], Any]):
    fields = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
    body = {"slo": {"ttlt": 60.0}, **(fields if read is parse_request else BODY)}
    with pytest.raises(ContractError) as refusal:
        read(msgspec.json.encode(body))

    assert str(refusal.value).endswith(
        "slo has the fields ttft_s, tbt_s, ttlt_s, deadline_at; did you mean `ttlt_s`?"
    )


def test_a_field_unlike_all_targets_has_no_nearest_one():
    with pytest.raises(ContractError, match=r"slo has the fields .*deadline_at$"):
        _targets(b'{"slo": {"budget": 1}}')
