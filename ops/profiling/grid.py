"""Grid of the measured iterations of an engine."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError
from shared.runtime.options import IntegerOption, read_by
from solver.prediction.latency.iteration_fit import IterationWork

_LEAST_REPEATS = 2


def integers(*, least: int) -> Parameter:
    """Option with integers of at least *least*, separated by commas."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not a list of integers N,N,...") from None
        if min(numbers) < least:
            raise ValueError(f"{text!r}: each value must be at least {least}")
        return numbers

    return read_by(
        read,
        metavar="N,N,...",
        show_default=lambda numbers: ",".join(map(str, numbers)),
    )


_Sizes = Annotated[tuple[int, ...], integers(least=1)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """
    Grid of measured iterations: prefills in chunks of each size, alone and with decodes of each
    batch size and context. Its fields are options of `headway profile`.
    """

    chunks: _Sizes = (16, 64, 256, 512, 1024, 2048)
    """Sizes of prefill chunks: tokens of a prompt in one iteration."""
    contexts: _Sizes = (64, 512, 2048)
    """Numbers of prompt tokens of each decoding request."""
    batches: _Sizes = (8, 32)
    """
    Numbers of decoding requests beside a chunk; decodes and prompts alone are always measured.
    """
    repeats: IntegerOption = 3
    """Repeats of the whole grid, at least 2; the last one is used to measure the error."""

    def __post_init__(self) -> None:
        for name in ("chunks", "contexts", "batches"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise SettingsError(f"{name}: all values must be at least 1: {values}")
        if self.repeats < _LEAST_REPEATS:
            raise SettingsError(
                f"repeats must be at least {_LEAST_REPEATS}, since the last repeat is used for "
                f"validation: {self.repeats}"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured iteration with at most one prefill."""

    work: IterationWork
    num_decodes: int
    decode_context_tokens: int
    """Prompt tokens of each decoding request."""
    before: int
    """
    Number of tokens of the iteration's prefill that were computed before; 0 without a prefill.
    """
    duration_s: Seconds

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens of the iteration's prefill; 0 without a prefill."""
        return self.work.tokens - self.num_decodes
