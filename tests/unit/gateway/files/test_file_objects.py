"""Objects and parameters of the Files API."""

from typing import Any

import pytest

from services.gateway.files.objects import (
    MAX_LIMIT,
    Page,
    UploadFields,
    file_list,
    file_object,
    parse_fields,
    parse_page,
)
from services.gateway.files.openapi import file_paths
from shared.contracts.errors import ContractError
from shared.store.files import LOST
from shared.store.ids import new_file_id
from tests.stores import NOW, a_file

ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"


def test_a_file_has_openais_fields():
    file = a_file(expires_at=NOW + 7.9)
    lost = file_object(a_file(status=LOST))

    assert file_object(file).created_at == int(NOW)
    assert file_object(file).expires_at == int(NOW) + 7
    assert (file_object(file).status, file_object(file).status_details) == ("processed", None)
    assert (lost.status, lost.status_details) == (
        "error",
        "the content of the file is lost; upload it again",
    )


def test_a_page_names_its_ends():
    first, last = a_file(), a_file()
    page = file_list([first, last], has_more=True)
    empty = file_list([], has_more=False)

    assert (page.first_id, page.last_id, page.has_more) == (first.id, last.id, True)
    assert (empty.first_id, empty.last_id, empty.data) == (None, None, [])


def test_parameters_of_a_list_have_defaults():
    after = new_file_id(NOW)
    query = {"limit": "5", "order": "asc", "after": after, "purpose": "batch"}

    assert parse_page({}) == Page(limit=MAX_LIMIT, order="desc")
    assert parse_page(query) == Page(limit=5, order="asc", after=after, purpose="batch")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("limit", str(MAX_LIMIT + 1)),
        ("limit", "x"),
        ("order", "up"),
        ("after", "batch_1"),
        ("purpose", "a\0b"),
    ],
)
def test_an_invalid_parameter_is_named(name: str, value: str):
    with pytest.raises(ContractError, match=f"^{name} ") as error:
        parse_page({name: value})

    assert (error.value.param, error.value.status) == (name, 400)


def test_fields_of_an_upload_are_read():
    life = {ANCHOR: "created_at", SECONDS: "3600"}

    assert parse_fields({"purpose": "batch"}) == UploadFields(purpose="batch")
    assert parse_fields({"purpose": "vision"} | life).expires_after_s == 3600.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": "batch", SECONDS: "3600"}, ANCHOR),
        ({"purpose": "batch", ANCHOR: "last_active_at", SECONDS: "3600"}, ANCHOR),
        ({"purpose": "batch", ANCHOR: "created_at"}, SECONDS),
        ({"purpose": "batch", ANCHOR: "created_at", SECONDS: "3599"}, SECONDS),
        ({"purpose": "batch", ANCHOR: "created_at", SECONDS: "2592001"}, SECONDS),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, str], param: str):
    with pytest.raises(ContractError) as error:
        parse_fields(fields)

    assert error.value.param == param


def test_the_document_refers_to_schemas_that_it_has():
    paths, schemas = file_paths()

    def references(part: Any) -> set[str]:
        if isinstance(part, dict):
            own = {part["$ref"].rpartition("/")[2]} if "$ref" in part else set()
            return own.union(*map(references, part.values()))
        return set().union(*map(references, part)) if isinstance(part, list) else set()

    assert references(paths) | references(schemas) == schemas.keys()
    assert sorted(paths) == ["/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"]
