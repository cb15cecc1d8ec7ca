"""The last death of a message, as versions of RabbitMQ describe it."""

from typing import Any

import pytest

from shared.broker.dead_letters import Death, last_death

FIRST = {"x-first-death-reason": "expired", "x-first-death-queue": "headway.delay.2000"}
LAST = {"x-last-death-reason": "rejected", "x-last-death-queue": "headway.held"}
LIST = {
    "x-death": [
        {"reason": "rejected", "queue": "headway.held", "count": 1},
        {"reason": "expired", "queue": "headway.delay.2000", "count": 1},
    ]
}
REJECTED = Death("rejected", "headway.held")


@pytest.mark.parametrize(
    ("headers", "death"),
    [
        (FIRST | LAST | LIST, REJECTED),
        (FIRST | LIST, REJECTED),
        (FIRST, Death("expired", "headway.delay.2000")),
        ({}, Death("unknown", "unknown")),
        ({"x-death": []}, Death("unknown", "unknown")),
        ({"x-death": "spoofed", **FIRST}, Death("expired", "headway.delay.2000")),
    ],
    ids=["RabbitMQ 4", "RabbitMQ 3.10", "one death", "none", "empty", "no list"],
)
def test_last_death(headers: dict[str, Any], death: Death):
    assert last_death(headers) == death
