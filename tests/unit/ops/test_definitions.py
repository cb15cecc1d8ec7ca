"""The committed RabbitMQ definitions."""

import re
from pathlib import Path

from ops.generate.definitions import definitions, render
from shared.broker import topology
from shared.broker.arguments import queue_arguments

COMMITTED = Path(__file__).parents[3] / "ops" / "rabbitmq" / "definitions.json"


def test_committed_definitions_are_current():
    """To update them: python -m ops.generate.definitions > ops/rabbitmq/definitions.json"""
    assert render(definitions()) == COMMITTED.read_text()


def test_passwords_can_be_replaced():
    users = definitions(passwords={"producer": "s3cret"})["users"]

    assert {"producer": "s3cret", "operator": "operator"}.items() <= {
        user["name"]: user["password"] for user in users
    }.items()


def test_only_the_operator_may_write_to_every_queue():
    """`amq.default` is the name that RabbitMQ checks for the default exchange."""
    permissions = definitions()["permissions"]

    assert [each["user"] for each in permissions if each["write"] == ".*"] == ["operator"]


def test_queue_arguments_are_equal_in_file_and_client():
    by_name = {queue["name"]: queue["arguments"] for queue in definitions()["queues"]}

    every = (*topology.QUEUES, *topology.DELAY_QUEUES)
    expected = {spec.name: queue_arguments(spec) for spec in every}

    assert by_name == {k: v for k, v in expected.items() if k != topology.WORK_QUEUES}


def test_gateways_may_ask_about_usage_and_requests_and_producers_may_not():
    """A producer sees its tenant's requests through a gateway, which authenticates it."""
    keys = {each["user"]: each["write"] for each in definitions()["topic_permissions"]}
    asked = (topology.CONTROL_USAGE, topology.CONTROL_STORIES)

    assert all(re.fullmatch(keys["headway-gateway"], key) for key in asked)
    assert not any(re.fullmatch(keys["producer"], key) for key in asked)
