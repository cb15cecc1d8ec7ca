"""Wire bytes of messages never change, because peers of other versions read them."""

import importlib
import json
import pkgutil

import msgspec
import pytest
from msgspec import structs

import shared.contracts
from shared.contracts.base import Decoder, Message, ModelName, encode, tag_of
from shared.contracts.estimates import Calibration, OutputTokens, Profile
from shared.contracts.plans import LaneForecast, LanesForecast
from shared.contracts.qos import OnLate
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import IterationsObserved, LanesObserved, RequestObserved
from tests.contract.messages.golden_messages import EXAMPLES, GOLDEN, golden_file


def message_types() -> set[type[Message]]:
    for module in pkgutil.iter_modules(shared.contracts.__path__):
        importlib.import_module(f"shared.contracts.{module.name}")
    found: set[type[Message]] = set()
    ahead = [Message]
    while ahead:
        for each in ahead.pop().__subclasses__():
            found.add(each)
            ahead.append(each)
    return {
        each
        for each in found
        if each.__module__.startswith("shared.") and not each.__name__.startswith("_")
    }


def test_messages_and_golden_files_match_one_to_one():
    assert message_types() == {type(example) for example in EXAMPLES}
    assert {golden_file(example) for example in EXAMPLES} == set(GOLDEN.glob("*.json"))


def test_tags_are_unique_and_versioned():
    tags = [tag_of(each) for each in message_types()]

    assert len(tags) == len(set(tags))
    assert [tag for tag in tags if tag.count(".") != 2 or ".v" not in tag] == []


def test_profiles_of_older_estimators_have_no_quantiles():
    decode: Decoder[Profile] = Decoder(Profile)
    lengths = decode((GOLDEN / "profile.published.v1.json").read_bytes()).output_tokens["*"]

    assert lengths == OutputTokens(mean=64.0, sd=20.0, count=40)
    assert (lengths.quantiles, lengths.calibration) == ((), None)


def test_length_fields_of_newer_estimators_are_decoded():
    reported = Calibration(count=9, bias=-1.5, spread=4.0, at=1000.5, coverage=((0.9, 0.88),))
    quantiles = ((0.5, 60.0), (0.9, 90.0))
    lengths = OutputTokens(mean=64.0, sd=20.0, count=9, quantiles=quantiles, calibration=reported)
    sent = Profile(
        model=ModelName("m"),
        engine="e",
        device="d",
        version=1,
        at=1.0,
        latency_calibration=reported,
        output_tokens={"*": lengths},
    )

    assert sent == Decoder(Profile)(encode(sent))


def test_observations_of_older_agents_have_no_finish_reason():
    decode: Decoder[RequestObserved] = Decoder(RequestObserved)
    observed = decode((GOLDEN / "request.observed.v1.json").read_bytes())

    assert (observed.finish_reason, observed.max_tokens, observed.ignore_eos) == (None, 0, False)


def test_lane_totals_of_older_groupers_have_no_expected_tokens():
    decode: Decoder[LanesObserved] = Decoder(LanesObserved)
    body = (GOLDEN / "lanes.observed.v1.json").read_bytes()
    (total,) = decode(body.replace(b"expected_tokens", b"max_tokens")).lanes

    assert (total.requests, total.expected_tokens) == (32, 0)


def test_ends_are_fields_that_older_requests_do_not_have():
    decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)
    body = (GOLDEN / "request.queued.v1.json").read_bytes()
    silent = decode(body)
    ends = structs.replace(silent, expires_at=1010.5, on_late=OnLate.DROP)

    assert (silent.expires_at, silent.on_late) == (None, OnLate.SERVE)
    assert json.loads(encode(ends)) == json.loads(body) | {
        "expires_at": 1010.5,
        "on_late": "drop",
    }
    assert decode(encode(ends)) == ends


def test_lane_totals_of_older_groupers_have_no_expired_requests():
    decode: Decoder[LanesObserved] = Decoder(LanesObserved)
    silent = decode((GOLDEN / "lanes.observed.v1.json").read_bytes())
    reported = structs.replace(silent, expired={"lane.a": 2})

    assert silent.expired == {}
    assert decode(encode(reported)) == reported
    assert json.loads(encode(reported)) == json.loads(encode(silent)) | {"expired": {"lane.a": 2}}


def test_iterations_of_older_agents_have_no_prefill_pairs():
    """Golden messages have no prefill pairs; newer messages have one more field."""
    decode: Decoder[IterationsObserved] = Decoder(IterationsObserved)
    silent = decode((GOLDEN / "iterations.observed.v1.json").read_bytes())
    reported = structs.replace(silent, prefill_pairs=(2048,))

    assert silent.prefill_pairs == ()
    assert decode(encode(reported)) == reported
    assert json.loads(encode(reported)) == json.loads(encode(silent)) | {"prefill_pairs": [2048]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: tag_of(type(example)))
class TestGolden:
    def test_example_is_encoded_to_the_golden_bytes(self, example: Message):
        assert golden_file(example).read_bytes() == encode(example)

    def test_golden_bytes_decode_to_the_example(self, example: Message):
        assert example == Decoder(type(example))(golden_file(example).read_bytes())

    def test_unknown_fields_are_ignored(self, example: Message):
        body = json.loads(golden_file(example).read_bytes()) | {"field_of_next_year": [1]}

        # Compact like the original: parts that are kept raw must be equal byte by byte.
        extended = json.dumps(body, separators=(",", ":")).encode()

        assert example == Decoder(type(example))(extended)


def test_forecasts_of_older_leaders_without_spread_are_decoded():
    """Golden forecasts have no `wait_sd_s`; the decoder keeps their other fields."""
    reported = LaneForecast(lane="lane.a", wait_s=12.5, wait_sd_s=1.5)
    (silent, _) = Decoder(LanesForecast)((GOLDEN / "lanes.forecast.v1.json").read_bytes()).lanes
    message = LanesForecast(epoch=7, at=1000.5, lanes=(reported,))

    assert silent.wait_sd_s is None
    assert Decoder(LanesForecast)(encode(message)) == message


def test_requests_queued_by_release_0_1_0_are_read():
    """Lanes are durable: requests of an older release wait in them during an upgrade."""
    body = (GOLDEN.parent / "earlier" / "request.queued.v1.0-1-0.json").read_bytes()
    (example,) = (each for each in EXAMPLES if isinstance(each, QueuedRequest))

    assert "foretold" in json.loads(body), "a field that release 0.1.0 wrote and this one renamed"
    earlier = msgspec.structs.replace(example, lane="lane.1.tiny.high.3.short")
    assert Decoder[QueuedRequest](QueuedRequest)(body) == earlier
