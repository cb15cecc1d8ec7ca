"""Bytes on the wire stay what they are: peers of other versions read them."""

import importlib
import json
import pkgutil

import pytest

import shared.contracts
from shared.contracts.base import Decoder, Message, encode, tag_of
from shared.contracts.plans import LaneForecast, LanesForecast
from tests.contract.golden_messages import EXAMPLES, GOLDEN, golden_file


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


def test_every_message_has_an_example_and_every_golden_file_a_message():
    assert message_types() == {type(example) for example in EXAMPLES}
    assert {golden_file(example) for example in EXAMPLES} == set(GOLDEN.glob("*.json"))


def test_tags_are_unique_and_versioned():
    tags = [tag_of(each) for each in message_types()]

    assert len(tags) == len(set(tags))
    assert [tag for tag in tags if tag.count(".") != 2 or ".v" not in tag] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: tag_of(type(example)))
class TestGolden:
    def test_encodes_to_the_golden_bytes(self, example: Message):
        assert golden_file(example).read_bytes() == encode(example)

    def test_golden_bytes_decode_to_the_example(self, example: Message):
        assert example == Decoder(type(example))(golden_file(example).read_bytes())

    def test_unknown_fields_are_ignored(self, example: Message):
        body = json.loads(golden_file(example).read_bytes()) | {"field_of_next_year": [1]}

        assert example == Decoder(type(example))(json.dumps(body).encode())


def test_forecasts_of_leaders_that_tell_no_spread_are_understood():
    """The golden ones do not; what is told beside them is kept."""
    told = LaneForecast(lane="lane.a", wait_s=12.5, wait_sd_s=1.5)
    (silent, _) = Decoder(LanesForecast)((GOLDEN / "lanes.forecast.v1.json").read_bytes()).lanes
    message = LanesForecast(epoch=7, at=1000.5, lanes=(told,))

    assert silent.wait_sd_s is None
    assert Decoder(LanesForecast)(encode(message)) == message
