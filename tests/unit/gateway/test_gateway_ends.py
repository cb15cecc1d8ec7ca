"""Ends of a request pass the door, and never reach an application or a server of others."""

import json

from services.gateway.call import Call
from services.gateway.door import _forwarded
from services.gateway.pass_through import published
from shared.api.calls import call_body, call_fields
from shared.contracts.base import TenantId
from shared.contracts.ends import accepted_ends
from shared.contracts.qos import Importance, OnLate, Slo
from tests.unit.gateway.rig import COMPLETION, MODEL, NOW

ENDS = {"expires_at": NOW + 60.0, "ttl_s": 5.0, "not_before": NOW + 1.0, "on_late": "drop"}
RAW = json.dumps(COMPLETION | ENDS).encode()


def test_application_gets_no_fields_of_the_mesh():
    forwarded = _forwarded(RAW, call_fields(RAW), MODEL, MODEL)

    assert json.loads(forwarded) == COMPLETION


def test_published_call_has_the_ends():
    call = Call(
        call_id="req-1",
        model=MODEL,
        tenant=TenantId("acme"),
        arrived_at=NOW,
        slo=Slo(),
        importance=Importance.HIGH,
        stream=False,
        ends=accepted_ends(call_body(call_fields(RAW)), now=NOW),
    )
    message = published(call, "/v1/completions", json.dumps(COMPLETION).encode())

    assert (message.expires_at, message.not_before) == (NOW + 6.0, NOW + 1.0)
    assert message.on_late is OnLate.DROP
    assert json.loads(bytes(message.body)) == COMPLETION
