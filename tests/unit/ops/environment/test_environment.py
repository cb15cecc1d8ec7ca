"""The broker that the demo and the tests choose."""

import pytest

from ops import environment
from shared.contracts.errors import BrokerUnavailableError

URL = "amqp://other:secret@127.0.0.1:5672/"


def test_a_virtual_host_that_the_user_may_not_use_is_removed(monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def run_ctl(command: list[str]) -> str:
        ran.append(command[2])
        if command[2] == "set_permissions":
            raise BrokerUnavailableError("no such user")
        return ""

    monkeypatch.setattr(environment, "run_ctl", run_ctl)
    monkeypatch.setattr(environment, "_answers", lambda _url: True)
    monkeypatch.setattr(environment.shutil, "which", lambda _name: "/bin/rabbitmqctl")
    monkeypatch.setenv("HEADWAY_AMQP_URL", URL)

    with environment.broker_for(None) as (url, _):
        assert url == URL
    assert ran == ["add_vhost", "set_permissions", "delete_vhost"]
