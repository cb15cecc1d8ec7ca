"""Checks of bodies in the form of HTTP, before vLLM's application reads them."""

import pytest

from shared.api.calls import call_fields
from shared.contracts.errors import ContractError


@pytest.mark.parametrize("value", ["5", '"a"', "[[]]", "true"])
def test_structured_outputs_must_be_an_object(value: str):
    with pytest.raises(ContractError, match="structured_outputs must be an object") as caught:
        call_fields(f'{{"model": "m", "structured_outputs": {value}}}'.encode())
    assert (caught.value.param, caught.value.status) == ("structured_outputs", 400)


@pytest.mark.parametrize("value", ["null", '{"choice": ["a"]}', ' {"choice": ["a"]}'])
def test_an_object_and_null_pass(value: str):
    body = f'{{"model": "m", "structured_outputs": {value}}}'.encode()
    assert call_fields(body).keys() == {"model", "structured_outputs"}
