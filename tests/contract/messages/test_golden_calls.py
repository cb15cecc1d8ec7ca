"""Wire bytes of calls never change, because peers of other versions read them."""

from pathlib import Path

import msgspec
import pytest

from shared.contracts.base import Decoder, encode
from shared.contracts.requests import QueuedRequest, RequestCompleted
from tests.contract.messages.examples.calls import BODY, CALLS
from tests.contract.messages.golden_messages import GOLDEN

FILES = Path(__file__).parent / "calls"


def test_examples_and_golden_files_match_one_to_one():
    assert {f"{name}.json" for name in CALLS} == {path.name for path in FILES.iterdir()}


@pytest.mark.parametrize("name", CALLS)
def test_example_is_encoded_to_the_golden_bytes_and_decoded_from_them(name: str):
    golden = (FILES / f"{name}.json").read_bytes()

    assert golden == encode(CALLS[name])
    assert CALLS[name] == Decoder(type(CALLS[name]))(golden)


@pytest.mark.parametrize("name", ["call.request", "request.queued.v1"])
def test_bodies_are_part_of_the_json_and_stay_as_they_are(name: str):
    assert b'"body":' + BODY in (FILES / f"{name}.json").read_bytes()


def test_messages_of_older_versions_have_no_call():
    queued = Decoder[QueuedRequest](QueuedRequest)((GOLDEN / "request.queued.v1.json").read_bytes())
    final = Decoder[RequestCompleted](RequestCompleted)(
        (GOLDEN / "request.completed.v1.json").read_bytes()
    )

    assert (queued.call, queued.num_answers, queued.progress.children) == (None, 1, ())
    assert (final.response, final.children) == (msgspec.UNSET, ())
