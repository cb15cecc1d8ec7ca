"""Access to the console."""

import pytest

from services.gateway.console.access import is_local, may_view
from shared.contracts.errors import ContractError
from tests.unit.gateway.rig import tenants_of

LOCAL = {"host": "localhost:8000"}


@pytest.mark.parametrize(
    ("headers", "peer"),
    [
        ({"host": "localhost:8000"}, "127.0.0.1"),
        ({"host": "127.0.0.1"}, "127.0.0.1"),
        ({"host": "[::1]:8000"}, "::1"),
    ],
)
def test_a_browser_on_this_machine_needs_no_key(headers: dict[str, str], peer: str):
    assert is_local(headers, peer)


@pytest.mark.parametrize(
    ("headers", "peer"),
    [
        ({"host": "localhost:8000"}, "10.0.0.7"),
        ({"host": "rebound.example:8000"}, "127.0.0.1"),
        ({"host": "localhost:8000", "x-forwarded-for": "10.0.0.7"}, "127.0.0.1"),
        ({"host": "localhost:8000", "forwarded": "for=10.0.0.7"}, "127.0.0.1"),
        ({}, "127.0.0.1"),
        ({"host": "localhost:8000"}, None),
        ({"host": "localhost:8000"}, "not an address"),
    ],
    ids=[
        "other machine",
        "other name",
        "proxy",
        "standard proxy",
        "no name",
        "no peer",
        "odd peer",
    ],
)
def test_all_others_are_not_local(headers: dict[str, str], peer: str | None):
    assert not is_local(headers, peer)


def test_without_keys_other_machines_may_not_view():
    tenants = tenants_of()
    may_view(tenants, LOCAL, "127.0.0.1")

    with pytest.raises(ContractError, match="create --tenant NAME --scope operator") as caught:
        may_view(tenants, LOCAL, "10.0.0.7")
    assert caught.value.status == 403
