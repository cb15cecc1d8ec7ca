"""What of an engine is measured."""

from dataclasses import dataclass

from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError
from solver.prediction.iteration_fit import IterationWork

_LEAST_REPEATS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Prompts in each chunk, alone and beside each batch of decodes with each context."""

    chunks: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048)
    """Tokens of a prompt in one iteration."""
    contexts: tuple[int, ...] = (64, 512, 2048)
    """Tokens of each decode's prompt."""
    batches: tuple[int, ...] = (8, 32)
    """Decodes."""
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("chunks", "contexts", "batches"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise SettingsError(f"{name} has to have values of at least 1: {values}")
        if self.repeats < _LEAST_REPEATS:
            raise SettingsError(
                f"repeats has to be at least {_LEAST_REPEATS}, one to judge by: {self.repeats}"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One iteration with at most one prefill."""

    work: IterationWork
    num_decodes: int
    decode_context_tokens: int
    """Of each decode's prompt."""
    before: int
    """Tokens of its prefill that were computed before; 0 without one."""
    duration_s: Seconds

    @property
    def chunk_tokens(self) -> int:
        """Of its prefill; 0 without one."""
        return self.work.tokens - self.num_decodes
