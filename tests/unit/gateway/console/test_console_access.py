"""Access to the console."""

import pytest

from services.gateway.console.access import may_view
from services.gateway.console.sessions import COOKIE, Sessions
from shared.contracts.errors import ContractError
from tests.unit.gateway.rig import tenants_of

TOKEN = "a-token-of-sixteen"


@pytest.mark.parametrize(
    ("headers", "peer"),
    [
        ({"host": "localhost:8000"}, "127.0.0.1"),
        ({"host": "[::1]:8000"}, "::1"),
        ({"host": "localhost:8000", "x-forwarded-for": "10.0.0.7"}, "127.0.0.1"),
        ({"host": "localhost:8000", "cookie": f"{COOKIE}="}, "127.0.0.1"),
        ({"host": "localhost:8000", "cookie": f"{COOKIE}={TOKEN}"}, "127.0.0.1"),
        ({"host": "localhost:8000", "cookie": "\x00=;;"}, "127.0.0.1"),
        ({}, None),
    ],
    ids=["local", "IPv6", "proxy", "empty cookie", "token as cookie", "odd cookie", "no peer"],
)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_no_address_opens_the_console(headers: dict[str, str], peer: str | None, token: str | None):
    with pytest.raises(ContractError, match="create --tenant NAME --scope operator") as caught:
        may_view(tenants_of(), Sessions(token), headers, peer)
    assert caught.value.status == 403


def test_the_cookie_of_the_link_opens_it_from_any_address():
    sessions = Sessions(TOKEN)
    session = sessions.open(TOKEN)

    may_view(tenants_of(), sessions, {"cookie": f"theme=dark; {COOKIE}={session}"}, "10.0.0.7")
    with pytest.raises(ContractError):
        may_view(tenants_of(), sessions, {"cookie": f"{COOKIE}={session}x"}, "10.0.0.7")


def test_the_cookie_outlives_a_restart_of_the_gateway():
    session = Sessions(TOKEN).open(TOKEN)
    may_view(tenants_of(), Sessions(TOKEN), {"cookie": f"{COOKIE}={session}"}, "127.0.0.1")
    with pytest.raises(ContractError):
        may_view(tenants_of(), Sessions(f"{TOKEN}2"), {"cookie": f"{COOKIE}={session}"}, None)


def test_the_link_works_once():
    sessions = Sessions(TOKEN)
    sessions.open(TOKEN)
    with pytest.raises(ContractError, match="works once"):
        sessions.open(TOKEN)


@pytest.mark.parametrize("token", ["", "another-token", TOKEN[:-1], f"{TOKEN}x"])
def test_another_token_opens_nothing_and_does_not_use_up_the_link(token: str):
    sessions = Sessions(TOKEN)
    with pytest.raises(ContractError) as caught:
        sessions.open(token)
    assert caught.value.status == 403
    assert sessions.open(TOKEN)


def test_without_a_token_there_is_no_link():
    with pytest.raises(ContractError):
        Sessions(None).open("")
