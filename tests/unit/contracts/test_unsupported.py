"""Over HTTP and AMQP, unsupported fields that would change an answer are refused by name."""

from typing import Any

import msgspec
import pytest

from shared.api.unsupported import WITHOUT_EFFECT, UnsupportedFields, refuse_unsupported
from shared.contracts.errors import ContractError

REFUSED = [
    ("structured_outputs", {"json": {}}),
    ("allowed_token_ids", [5]),
    ("stop_token_ids", [2]),
    ("bad_words", ["no"]),
    ("continue_final_message", True),
    ("prompt_logprobs", 0),
    ("return_token_ids", True),
    ("include_stop_str_in_output", True),
    ("min_p", 0.1),
    ("logprobs", 0),
    ("logprobs", True),
    ("tool_choice", "auto"),
    ("n", 2),
    ("n", True),
    ("skip_special_tokens", False),
]


def check(body: dict[str, Any]) -> None:
    refuse_unsupported(msgspec.json.decode(msgspec.json.encode(body), type=UnsupportedFields))


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_field_with_an_effect_is_refused_by_name(name: str, value: object):
    with pytest.raises(ContractError, match=f"{name} is not supported") as caught:
        check({"model": "m", name: value})

    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_values_without_an_effect_are_accepted(name: str):
    for value in (None, *WITHOUT_EFFECT[name]):
        check({"model": "m", name: value})


def test_accepted_value_is_part_of_the_error():
    with pytest.raises(ContractError, match="n is not supported; only 1 is accepted"):
        check({"n": 3})
