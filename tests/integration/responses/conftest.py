"""The clock of a store."""

import pytest

from tests.stores import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """The databases' clock, so that a gateway is gone when a test says so."""
    return ManualClock()
