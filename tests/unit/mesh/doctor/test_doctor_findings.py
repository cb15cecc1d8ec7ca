"""What the doctor concludes from a broker's own words and from the reports of services."""

import pytest

from services.mesh.doctor.findings import Level
from services.mesh.doctor.server import on_server, on_user
from services.mesh.doctor.services import MOST_SKEW_S, of_peers
from shared.broker.amqp.inspection import Server


def deviating(product: str, version: str, channel_max: int = 2047) -> list[str]:
    """Subjects of the deviations of a broker."""
    server = Server(product=product, version=version, channel_max=channel_max)
    return [each.check for each in on_server(server) if each.level is Level.DEVIATION]


@pytest.mark.parametrize("version", ["3.10.8", "3.13.7", "4.0.5", "4.2.1"])
def test_supported_releases_do_not_deviate(version: str):
    assert deviating("RabbitMQ", version) == []


@pytest.mark.parametrize(
    ("product", "version"),
    [("RabbitMQ", "3.9.29"), ("RabbitMQ", "unknown"), ("LavinMQ", "2.0.0")],
)
def test_other_brokers_deviate(product: str, version: str):
    assert deviating(product, version) == ["version"]


def test_few_channels_deviate_and_no_limit_does_not():
    assert deviating("RabbitMQ", "4.0.5", channel_max=128) == ["channels"]
    assert deviating("RabbitMQ", "4.0.5", channel_max=0) == []


def test_sizes_are_mentioned_from_release_4_on():
    def checks(version: str) -> set[str]:
        server = Server(product="RabbitMQ", version=version, channel_max=0)
        return {each.check for each in on_server(server)}

    assert checks("4.0.5") - checks("3.13.7") >= {"sizes", "delivery limit"}


def test_user_that_groupers_do_not_trust_is_named():
    assert list(on_user("guest")) == []
    (finding,) = on_user("app")
    assert "'app'" in finding.what


def test_clock_of_a_service_that_differs_is_named():
    heard = {"agent a0": 0.1, "grouper g": -MOST_SKEW_S - 0.5}
    clocks = [each for each in of_peers(heard) if each.check == "clocks"]
    assert [each.level for each in clocks] == [Level.DEVIATION]
    assert "grouper g" in clocks[0].what


def test_mesh_without_agents_deviates():
    (finding,) = of_peers({"grouper g": 0.0})
    assert finding.level is Level.DEVIATION
    assert "agent" in finding.what
