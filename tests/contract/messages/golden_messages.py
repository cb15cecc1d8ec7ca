"""
One example of every message; `python -m tests.contract.messages.golden_messages` writes missing
files.

The examples are in `tests.contract.messages.examples`, by contract module. Golden files are never
overwritten, because different bytes for a message would break running peers.
"""

from pathlib import Path

from shared.contracts.base import Message, encode, tag_of
from tests.contract.messages.examples import (
    control,
    estimates,
    lanes,
    plans,
    requests,
    routing,
    stored,
    stories,
    telemetry,
    tenants,
)

GOLDEN = Path(__file__).parent / "golden"

EXAMPLES: tuple[Message, ...] = (
    *control.EXAMPLES,
    *estimates.EXAMPLES,
    *lanes.EXAMPLES,
    *plans.EXAMPLES,
    *requests.EXAMPLES,
    *routing.EXAMPLES,
    *stored.EXAMPLES,
    *stories.EXAMPLES,
    *telemetry.EXAMPLES,
    *tenants.EXAMPLES,
)


def golden_file(message: Message) -> Path:
    return GOLDEN / f"{tag_of(type(message))}.json"


if __name__ == "__main__":
    for example in EXAMPLES:
        if not golden_file(example).exists():
            golden_file(example).write_bytes(encode(example))
