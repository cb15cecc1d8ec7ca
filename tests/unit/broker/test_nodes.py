"""A broker whose nodes a list of URLs names."""

import pytest

from shared.broker.amqp.connection import broker_user
from shared.broker.amqp.nodes import Nodes
from shared.contracts.errors import SettingsError
from shared.runtime.settings import masked_url

THREE = "amqp://me:secret@one/mesh, amqp://me:secret@two:5673/mesh,amqp://me:secret@three/mesh"


def test_each_node_has_its_turn_and_the_first_follows_the_last():
    nodes = Nodes(THREE)

    assert [str(nodes.next()) for _ in range(4)] == [
        "one:5672",
        "two:5673",
        "three:5672",
        "one:5672",
    ]
    assert nodes.login == "amqp://me:secret@one/mesh"


def test_a_single_url_is_one_node():
    nodes = Nodes("amqps://me:secret@one/mesh?cafile=/ca.pem")

    assert [str(node) for node in nodes.all] == ["one:5671"]


@pytest.mark.parametrize(
    "second",
    [
        "amqp://other:secret@two/mesh",
        "amqp://me:other@two/mesh",
        "amqp://me:secret@two/",
        "amqps://me:secret@two/mesh",
        "amqp://me:secret@two/mesh?heartbeat=5",
    ],
)
def test_urls_that_differ_in_more_than_host_and_port_are_refused(second: str):
    with pytest.raises(SettingsError, match=r"URL 2 of the broker's 2 differs") as refused:
        Nodes(f"amqp://me:secret@one/mesh,{second}")

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("text", ["amqp://one,two/", "amqp://me:se/cret@one/,amqp://two/"])
def test_a_list_that_cannot_be_read_is_refused_without_its_passwords(text: str):
    with pytest.raises(SettingsError, match="separated by commas") as refused:
        Nodes(text)

    assert "cret" not in str(refused.value)


def test_the_user_of_a_list_is_that_of_its_first_url():
    assert broker_user(THREE) == "me"


def test_users_and_passwords_of_a_list_are_masked():
    assert masked_url(THREE) == "amqp://***@one/mesh,amqp://***@two:5673/mesh,amqp://***@three/mesh"
