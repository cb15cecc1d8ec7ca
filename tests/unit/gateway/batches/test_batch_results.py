"""Lines of output and error files, in the form that OpenAI documents."""

import json

import msgspec

from services.gateway.batches.results import (
    LineError,
    Unfinished,
    answered,
    has_expired,
    is_retried,
    refused,
    unfinished,
    was_cancelled,
    without_response,
)
from shared.contracts.base import RequestId
from shared.contracts.requests import ErrorInfo, RequestFailed

ID = RequestId("batch_0123-000007")


def failed(at: float = 100.0, **fields: object) -> RequestFailed:
    values: dict[str, object] = {"message": "no", "code": "bad", "status": 400}
    return RequestFailed(request_id=ID, error=ErrorInfo(**(values | fields)), at=at)  # type: ignore[arg-type]  # names of fields


def test_an_answer_is_a_line_with_the_response_as_it_came():
    line = answered(ID, "mine", b'{"id": "x", "n": 1.50}')

    assert line.endswith(b"\n")
    assert b'{"id": "x", "n": 1.50}' in line
    assert json.loads(line) == {
        "id": "batch_req_0123-000007",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": ID, "body": {"id": "x", "n": 1.5}},
        "error": None,
    }


def test_a_line_is_one_line_for_every_client():
    text = "a\x85b\u2028c\u2029d\x1ce\x0bf"
    line = answered(ID, "c\u2028", msgspec.json.encode({"text": text}))

    assert len(line.decode().splitlines()) == 1
    assert msgspec.json.decode(line)["response"]["body"] == {"text": text}
    assert msgspec.json.decode(line)["custom_id"] == "c\u2028"


def test_a_response_in_several_lines_becomes_one():
    line = answered(ID, "mine", b'{\n  "id": "x"\n}')

    assert line.count(b"\n") == 1
    assert json.loads(line)["response"]["body"] == {"id": "x"}


def test_a_refusal_has_the_response_of_http():
    line = json.loads(refused(ID, None, failed(param="body").error))

    assert line["error"] is None
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "body",
        "code": "bad",
    }


def test_a_server_s_refusal_is_passed_on_as_it_came():
    own = ErrorInfo(message="no", code="bad", status=422, response=msgspec.Raw(b"not\njson"))

    assert json.loads(refused(ID, "1", own))["response"]["body"] == "not\njson"


def test_a_line_that_was_not_run_has_an_error_and_no_response():
    late = json.loads(without_response(ID, "1", unfinished(Unfinished.EXPIRED)))
    invalid = json.loads(without_response(ID, None, LineError(code="c", message="m", param="url")))

    assert late["response"] is None
    assert late["error"]["code"] == "batch_expired"
    assert invalid["error"] == {"code": "c", "message": "m", "param": "url"}


def test_refusals_for_load_are_not_results():
    assert is_retried(failed(status=429))
    assert is_retried(failed(status=503))
    assert not is_retried(failed(status=500))


def test_a_line_expires_with_its_batch_or_by_its_own_end():
    assert has_expired(failed(at=100.0, code="deadline_expired", status=504), 100.5)
    assert not has_expired(failed(at=50.0, code="deadline_expired", status=504), 100.5)
    assert not has_expired(failed(at=200.0), 100.5)
    assert was_cancelled(failed(code="cancelled", status=499))
