"""Settings of batches."""

from typing import Annotated

import msgspec
from msgspec import Meta

PositiveS = Annotated[float, Meta(gt=0)]
Positive = Annotated[int, Meta(ge=1)]


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and pace of the batches that a gateway runs; without a store there are none."""

    max_running: Annotated[int, Meta(ge=0)] = 16
    """
    Maximum number of batches that this gateway runs at once; others run them, or they wait. 0: the
    gateway accepts batches and runs none.
    """
    max_lines: Annotated[int, Meta(ge=1, le=999_999)] = 50_000
    """Maximum number of lines of a batch."""
    max_file_bytes: Positive = 200 * 2**20
    """Maximum size of the input file of a batch."""
    lease_s: PositiveS = 10.0
    """Time without a sign of life after which another gateway takes over a batch."""
    poll_s: PositiveS = 0.2
    """Shortest period of looking for answers of a batch; it rises to 1 s while there are none."""
    min_waiting: Positive = 128
    """Lines of a batch that may wait for an engine in any case."""
    max_waiting: Positive = 1024
    """Maximum number of lines of a batch that wait for an engine; the others wait in the store."""
    max_outstanding: Positive = 4096
    """Maximum number of lines of a batch that wait for an engine or run."""
    lead_s: PositiveS = 10.0
    """Time for which the waiting lines of a batch should keep engines busy."""
    settle_s: PositiveS = 10.0
    """Time to wait for lines that still run when a batch is cancelled or its window has ended."""
