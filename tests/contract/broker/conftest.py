"""The contract of the broker holds on every release of RabbitMQ."""

from typing import Any

import pytest

from tests.brokers import MEMORY
from tests.conftest import RABBIT_4, RABBIT_PARAMS


@pytest.fixture(params=[MEMORY, *RABBIT_PARAMS, RABBIT_4])
def broker_target(request: Any) -> str:
    """Broker of `broker_rig`."""
    return str(request.param)


@pytest.fixture(params=[*RABBIT_PARAMS, RABBIT_4])
def rabbit_target(request: Any) -> str:
    """Server of `rabbit_url`."""
    return str(request.param)
