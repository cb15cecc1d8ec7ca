"""Telemetry of one engine, from the shared memory of each of its cores."""

from dataclasses import replace
from pathlib import Path

from services.agent.backends.base import EngineLoad
from services.agent.backends.totals import EngineTotals
from services.agent.backends.vllm.shared.stats import StatsReader, rank_path
from shared.contracts.telemetry import EngineIteration


class RankStats:
    """
    Sums over the data-parallel ranks of an engine; most engines have one rank.

    Args:
        path: File of the first rank; this class creates the files of all ranks.
        num_ranks: Number of engine cores.
    """

    def __init__(self, path: Path, num_ranks: int) -> None:
        self._readers = [StatsReader(rank_path(path, rank)) for rank in range(num_ranks)]

    @property
    def path(self) -> Path:
        """File of the first rank."""
        return self._readers[0].path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files of all ranks."""
        return tuple(reader.path for reader in self._readers)

    def load(self) -> EngineLoad:
        """The load after the last iteration; `token_budget` is that of the first rank."""
        loads = [reader.load() for reader in self._readers]
        totals = sum(
            (EngineTotals(scheduling=x.scheduling, checkpoints=x.checkpoints) for x in loads),
            EngineTotals(),
        )
        return replace(
            loads[0],
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            max_running=sum(load.max_running for load in loads),
            # All ranks have the same capacity.
            kv_utilization=sum(load.kv_utilization for load in loads) / len(loads),
            kv_capacity_tokens=sum(load.kv_capacity_tokens for load in loads),
            host_kv_bytes=sum(load.host_kv_bytes for load in loads),
            host_kv_capacity_bytes=sum(load.host_kv_capacity_bytes for load in loads),
            scheduling=totals.scheduling,
            checkpoints=totals.checkpoints,
        )

    def drain(self) -> tuple[EngineIteration, ...]:
        """Iterations since the last call, those of each rank in their order."""
        return tuple(iteration for reader in self._readers for iteration in reader.drain())

    def limit(self, *, token_budget: int, max_running: int) -> None:
        """Set the limits: *token_budget* of each rank, *max_running* of all ranks together."""
        share = -(-max_running // len(self._readers))
        for reader in self._readers:
            reader.limit(token_budget=token_budget, max_running=share)
