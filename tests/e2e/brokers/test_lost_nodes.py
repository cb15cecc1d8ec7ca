"""A node of the broker's cluster is killed under load; each request gets one answer."""

import pytest

from ops.bench.lost_nodes import lost_nodes
from tests.brokers import release_of

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]


async def test_the_loss_of_the_node_that_all_clients_use_loses_and_doubles_no_answer() -> None:
    release_of("rabbitmq")
    result = await lost_nodes(num_requests=240, kills=(0,), seed=0)

    assert {line.name: line.value for line in result.lines if not line.holds} == {}
