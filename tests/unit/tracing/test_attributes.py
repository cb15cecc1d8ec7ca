"""The allow-list of attributes of spans."""

import msgspec

from shared.contracts.requests import ApiCall, ChatMessage
from shared.tracing.attributes import MAX_CHARS, Attribute, asked, exported, operation_of
from tests.queued import a_request

SECRET = "what the user said"


def test_attributes_outside_the_allow_list_are_not_exported():
    attributes = {Attribute.TENANT: "acme", "gen_ai.prompt": SECRET, "authorization": "Bearer x"}

    assert exported(attributes) == {"headway.tenant": "acme"}  # type: ignore[arg-type]


def test_allow_list_has_no_attribute_for_prompts_answers_or_keys():
    names = {each.value for each in Attribute}

    forbidden = ("prompt", "completion", "input.messages", "output.messages", "key", "header")
    assert [name for name in names if any(word in name for word in forbidden)] == []


def test_long_texts_of_producers_are_cut():
    (value,) = exported({Attribute.APPLICATION: "x" * 1000}).values()

    assert value == "x" * MAX_CHARS


def test_what_is_asked_for_does_not_contain_the_prompt():
    call = ApiCall(
        endpoint="/v1/completions", body=msgspec.Raw(f'{{"prompt":"{SECRET}"}}'.encode())
    )
    requests = (
        a_request(prompt=SECRET),
        a_request(prompt=None, messages=(ChatMessage(role="user", content=SECRET),)),
        a_request(prompt=None, call=call),
    )

    assert all(SECRET not in str(exported(asked(each))) for each in requests)


def test_operation_has_the_name_of_the_conventions():
    def call(endpoint: str, **fields: bool) -> ApiCall:
        return ApiCall(endpoint=endpoint, body=msgspec.Raw(b"{}"), **fields)

    assert operation_of(a_request()) == "text_completion"
    assert operation_of(a_request(prompt=None, messages=())) == "chat"
    assert operation_of(a_request(prompt=None, call=call("/v1/responses"))) == "chat"
    assert operation_of(a_request(prompt=None, call=call("/v1/completions"))) == "text_completion"
    embeddings = call("/v1/embeddings", pools=True)
    assert operation_of(a_request(prompt=None, call=embeddings)) == "embeddings"
