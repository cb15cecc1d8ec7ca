"""
A mesh in front of two stock `vllm serve`, against clients that choose the server themselves.

Interactive requests (Q1), requests with a limit for the whole answer (Q2) and batch requests share
the servers; a fixed number of batch requests is always open. Targets are fixed multiples of the
times of unloaded servers. The load is the one at which the better of round robin and least loaded,
each also with vLLM's `priority`, misses a given share of the interactive targets in the mean over
the seeds; then all arms serve it one after another. The speed of a machine varies between two arms,
so the batch work of the mesh is compared with that of the better baseline in further pairs of
rounds, one directly after the other, in alternating order.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from ops.bench.attach_arms import (
    BY_CLASS,
    Arm,
    Balanced,
    Outcome,
    cpu_s,
    mesh_spec,
    meshed,
    stock_servers,
)
from ops.bench.cores import EngineCores, agent_pids, apart_from_engines
from ops.bench.engine_load import Planned, planned_load
from ops.bench.progress import say
from ops.bench.rate_search import RateSearch
from ops.bench.result import Line, Result
from ops.environment import broker_for
from services.agent.backends.remote.server import Server
from services.agent.backends.settings import RemoteSettings
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from services.mesh.processes import ProcessMesh
from services.mesh.spec import EMBEDDED
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models

MODEL = ModelName("tiny-llama")
ARCHITECTURE = msgspec.structs.replace(TINY_MODELS[MODEL], num_layers=16)
"""
Deeper than the tiny models, so that an engine's time for a request outweighs that of the processes
around it, as on a GPU.
"""
INTERACTIVE, BATCH = "Q1", "batch"
MULTIPLES = {"ttft": 10.0, "tbt": 10.0, "Q2": 20.0}
"""Ratio of each target to the median of its time on the unloaded server."""
MISSED = (0.3, 0.4, 0.5)
"""Shares of interactive targets that the better baseline misses, which determine the loads."""
AT = (0.4, 0.5)
"""Shares at which the mesh has a bound."""
TOLERANCE = 0.05
NUM_BATCH = 24
"""Number of batch requests that are always open; fewer than the servers can run."""
MANY_BATCH = 48
"""Number of open batch requests that are more than the servers can run."""
BATCH_TOKENS, BATCH_PROMPT = 64, 96
MOST_MISSED_RATIO, MOST_BATCH_RATIO = 0.6, 1 / 0.95
FIRST_RPS = 4.0
_STEP = 1.25
"""Ratio of the rates at which the baselines are compared."""
OURS, OWN = "headway", "headway, own engines"
ORACLE = "oracle"
"""
Least loaded, with the interactive requests alone on the servers: no policy that serves the other
requests as well can be expected to miss fewer targets.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the benchmark's measurements."""

    interactive: int
    """Expected number of interactive requests of a load that is not too long."""
    most_load_s: Seconds
    patience_s: Seconds
    alone: int
    shares: tuple[float, ...]
    seeds: int
    probes: int
    pairs: int
    """Number of pairs of rounds for each load and number of open batch requests."""


QUICK = Sizes(
    interactive=8,
    most_load_s=5.0,
    patience_s=3.0,
    alone=6,
    shares=(0.4,),
    seeds=1,
    probes=2,
    pairs=0,
)
FULL = Sizes(
    interactive=60,
    most_load_s=60.0,
    patience_s=8.0,
    alone=40,
    shares=MISSED,
    seeds=3,
    probes=6,
    pairs=2,
)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with targets, which arrive within a duration."""

    requests: Sequence[Planned]
    duration_s: Seconds


@dataclass(slots=True)
class Round:
    """What one arm has done under one load."""

    late: Sequence[bool]
    """True for each interactive request with a missed target, in order of the load."""
    late_q2: Sequence[bool]
    """The same of the requests with a limit for the whole answer."""
    batch_per_cpu_s: float
    """Tokens of batch requests per CPU second of the servers."""
    mesh_cores: float = 0.0
    """CPU time of the mesh per second."""

    @property
    def missed(self) -> float:
        """Share of interactive requests with a missed target."""
        return _share(self.late)

    @property
    def missed_q2(self) -> float:
        """Share of requests with a missed limit for the whole answer."""
        return _share(self.late_q2)

    def missed_of(self, served: Sequence[bool]) -> float:
        """Share with a missed target among the interactive requests for which *served* is true."""
        return _share([late for late, counts in zip(self.late, served, strict=True) if counts])


def _share(found: Sequence[bool]) -> float:
    return sum(found) / max(1, len(found))


@dataclass(slots=True)
class Bench:
    """The running servers and arms."""

    arms: Mapping[str, Arm]
    slos: Mapping[str, Slo]
    server_pids: Mapping[str, Sequence[int]]
    """Arm -> processes whose CPU time counts as the engines'."""
    mesh_pids: Mapping[str, Sequence[int]]
    cores: EngineCores
    sizes: Sizes
    seed: int
    search: RateSearch = field(default_factory=lambda: RateSearch(first_rps=FIRST_RPS))
    """Trials with the better baseline; the share is the mean over the seeds."""
    rates: dict[float, float] = field(default_factory=dict)

    async def serve(self, name: str, load: Load, num_batch: int = NUM_BATCH) -> Round:
        """Serve *load* with one arm, and *num_batch* batch requests at a time."""
        arm, requests = self.arms[name], load.requests
        engines, mesh = self.server_pids[name], self.mesh_pids.get(name, ())
        batch: list[Outcome] = []
        if name == ORACLE:
            num_batch = 0
            requests = [each for each in requests if each.class_name == INTERACTIVE]
        keeping = asyncio.create_task(self._keep_batch(arm, batch, num_batch))
        await asyncio.sleep(1.0)  # batch requests run when the load begins
        begun, begun_at = time.perf_counter(), time.time()
        used_s, mesh_s = cpu_s(engines), cpu_s(mesh)
        computed = sum(each.num_tokens for each in batch)
        served: list[tuple[Planned, Outcome]] = []
        tasks = []
        for each in requests:
            await asyncio.sleep(max(0.0, begun + each.at_s - time.perf_counter()))
            outcome = Outcome(begun_at + each.at_s)
            served.append((each, outcome))
            slo = self.slos[each.class_name]
            ask = arm.ask(each.prompt, each.output_tokens, each.class_name, slo, outcome)
            tasks.append(asyncio.create_task(ask))
        await asyncio.sleep(max(0.0, begun + load.duration_s - time.perf_counter()))
        elapsed_s = time.perf_counter() - begun
        tokens = sum(each.num_tokens for each in batch) - computed
        engine_s, mesh_used_s = cpu_s(engines) - used_s, cpu_s(mesh) - mesh_s
        await asyncio.wait(tasks, timeout=self.sizes.patience_s) if tasks else None
        for task in (*tasks, keeping):
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(keeping, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return Round(
            late=self._late(served, INTERACTIVE),
            late_q2=self._late(served, "Q2"),
            batch_per_cpu_s=tokens / max(1e-9, engine_s),
            mesh_cores=mesh_used_s / elapsed_s,
        )

    def load(self, number: int, rate_rps: float) -> Load:
        """The requests with targets of one load, half of them interactive."""
        duration_s = min(self.sizes.most_load_s, 2 * self.sizes.interactive / rate_rps)
        # Two of three classes have targets.
        planned = planned_load(
            seed=self.seed + number, rate_rps=1.5 * rate_rps, duration_s=duration_s
        )
        return Load([each for each in planned if each.class_name in self.slos], duration_s)

    async def rate(self, baseline: str, share: float) -> float:
        """Rate at which *baseline* misses *share* of the interactive targets, over all seeds."""
        for _ in range(self.sizes.probes):
            rate_rps = self.search.next_rps(share)
            loads = [self.load(number, rate_rps) for number in range(self.sizes.seeds)]
            missed = statistics.mean([(await self.serve(baseline, load)).missed for load in loads])
            self.search.missed[rate_rps] = missed
            say(f"{baseline} at {rate_rps:.1f}/s misses {missed:.0%}, wanted {share:.0%}")
            if abs(missed - share) <= TOLERANCE:
                break
        return self.search.nearest_rps(share)

    async def _keep_batch(self, arm: Arm, outcomes: list[Outcome], num_open: int) -> None:
        """Keep *num_open* batch requests open until cancelled."""
        random = np.random.default_rng(self.seed)

        async def one() -> None:
            while True:
                prompt = tuple(random.integers(10, 500, BATCH_PROMPT).tolist())
                outcome = Outcome(time.time())
                outcomes.append(outcome)
                await arm.ask(prompt, BATCH_TOKENS, BATCH, Slo(), outcome)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_open):
                group.create_task(one())

    def _late(self, served: Sequence[tuple[Planned, Outcome]], class_name: str) -> list[bool]:
        return [
            is_missed(outcome, self.slos[class_name])
            for planned, outcome in served
            if planned.class_name == class_name
        ]


def is_missed(outcome: Outcome, slo: Slo) -> bool:
    """True if the first or the last token was later than its deadline (QoServe eqs 1-3)."""
    if not outcome.finished or outcome.first_token_at is None or outcome.last_token_at is None:
        return True
    arrived_at = outcome.arrived_at
    late = outcome.last_token_at > slo.completion_deadline_at(arrived_at)
    if slo.ttft_s is None:
        return late
    late |= outcome.first_token_at > slo.token_deadline_at(arrived_at, 1)
    return late or outcome.last_token_at > slo.token_deadline_at(arrived_at, outcome.num_tokens)


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run has one load and one seed, and no engines of the mesh."""
    reason = vllm_unavailable_reason()
    if reason is not None:
        raise SettingsError(reason)
    result = Result(name="attach", seed=seed, quick=quick)
    sizes = QUICK if quick else FULL
    with (
        apart_from_engines() as cores,
        broker_for(broker or "private") as (url, line),
        tempfile.TemporaryDirectory() as directory,
    ):
        if url == EMBEDDED:
            raise SettingsError(f"this benchmark needs RabbitMQ; {line}")
        root = Path(directory)
        models = make_tiny_models(root / "models", models={MODEL: ARCHITECTURE})
        entry = ModelRegistry.load(models).entry(MODEL)
        async with AsyncExitStack() as stack:
            stock = await stack.enter_async_context(stock_servers(entry, root))
            for server in stock:
                cores.give_to_children(server.pid)
            spec = mesh_spec(url, entry, root, stock)
            mesh = await stack.enter_async_context(ProcessMesh(spec))
            ours = await stack.enter_async_context(meshed(mesh, MODEL))
            clients = [Server(RemoteSettings(url=each.url)) for each in stock]
            for client in clients:
                stack.push_async_callback(client.close)
            alone = Balanced(servers=clients, model=MODEL, least_loaded=False)
            slos = await _targets(alone, sizes, seed, result)
            arms = _baselines(clients)
            arms |= {ORACLE: arms["least loaded, priority"], OURS: ours}
            bench = Bench(
                arms=arms,
                slos=slos,
                server_pids={name: [each.pid for each in stock] for name in arms},
                cores=cores,
                mesh_pids={OURS: [process.pid for process in mesh.processes.values()]},
                sizes=sizes,
                seed=seed,
            )
            best = await _better_baseline(bench)
            rounds = await _compared(bench, best)
            pairs = {each: await _paired(bench, best, each) for each in (NUM_BATCH, MANY_BATCH)}
        if not quick:
            await _with_own_engines(url, entry, root, bench, rounds)
    report(result, rounds, pairs, sizes)
    return result


_NO_BASELINES = (OURS, OWN, ORACLE)
Pair = tuple[Round, Round]
"""Rounds of the better baseline and of the mesh, one directly after the other."""
Rounds = dict[tuple[float, int], dict[str, Round]]
"""(Share of misses of the better baseline, number of the seed) -> arm -> its round."""


def _baselines(servers: Sequence[Server]) -> dict[str, Arm]:
    """Clients that choose the server, with and without priorities."""
    return {
        f"{'least loaded' if least else 'round robin'}{', priority' if priorities else ''}": (
            Balanced(servers=servers, model=MODEL, least_loaded=least, priorities=priorities)
        )
        for least in (False, True)
        for priorities in (None, BY_CLASS)
    }


async def _targets(arm: Arm, sizes: Sizes, seed: int, result: Result) -> dict[str, Slo]:
    """Targets from serving one request at a time."""
    load = planned_load(seed=seed + 2000, rate_rps=1.0, duration_s=3.0 * sizes.alone)
    outcomes = []
    for each in load[: sizes.alone]:
        outcome = Outcome(time.time())
        await arm.ask(each.prompt, each.output_tokens, BATCH, Slo(), outcome)
        outcomes.append(outcome)
    measured = outcomes[len(outcomes) // 4 :]  # the first ones warm up
    first_s = statistics.median((o.first_token_at or 0.0) - o.arrived_at for o in measured)
    whole_s = statistics.median((o.last_token_at or 0.0) - o.arrived_at for o in measured)
    gaps_s = [
        ((o.last_token_at or 0.0) - (o.first_token_at or 0.0)) / (o.num_tokens - 1)
        for o in measured
        if o.num_tokens > 1
    ]
    gap_s = statistics.median(gaps_s)
    result.figures["unloaded p50, ms"] = {
        "first token": 1e3 * first_s,
        "gap": 1e3 * gap_s,
        "answer": 1e3 * whole_s,
    }
    return {
        INTERACTIVE: Slo(ttft_s=MULTIPLES["ttft"] * first_s, tbt_s=MULTIPLES["tbt"] * gap_s),
        "Q2": Slo(ttlt_s=MULTIPLES["Q2"] * whole_s),
    }


async def _compared(bench: Bench, best: str) -> Rounds:
    """Find the loads with the baseline *best*, and let all arms serve them in turns."""
    rounds = Rounds()
    for share in bench.sizes.shares:
        rate_rps = bench.rates[share] = await bench.rate(best, share)
        for number in range(bench.sizes.seeds):
            names = list(bench.arms)
            turn = number % len(names)
            load = bench.load(number, rate_rps)
            rounds[share, number] = {
                name: await bench.serve(name, load) for name in (*names[turn:], *names[:turn])
            }
            missed = ", ".join(
                f"{name} {each.missed:.0%}" for name, each in rounds[share, number].items()
            )
            say(f"{rate_rps:.1f}/s, seed {bench.seed + number}, missed: {missed}")
    return rounds


async def _paired(bench: Bench, best: str, num_batch: int) -> list[Pair]:
    """Let the baseline *best* and the mesh serve loads of other seeds, one after the other."""
    pairs = []
    for share, rate_rps in bench.rates.items():
        for number in range(bench.sizes.pairs):
            load = bench.load(bench.sizes.seeds + number, rate_rps)
            names = (best, OURS) if number % 2 == 0 else (OURS, best)
            served = {name: await bench.serve(name, load, num_batch) for name in names}
            pair = served[best], served[OURS]
            pairs.append(pair)
            say(f"{share:.0%}, {num_batch} batch requests: {_batch_ratio(*pair):.3f}")
    return pairs


async def _better_baseline(bench: Bench) -> str:
    """The baseline that misses the fewest targets, at a rate at which targets are missed."""
    await bench.serve(OURS, bench.load(999, 2.0))  # warm-up
    names = [name for name in bench.arms if name not in _NO_BASELINES]
    rate_rps = FIRST_RPS
    for _ in range(bench.sizes.probes):
        if (await bench.serve(names[0], bench.load(998, rate_rps))).missed >= min(MISSED):
            break
        rate_rps *= _STEP
    probes = {name: await bench.serve(name, bench.load(998, rate_rps)) for name in names}
    return min(names, key=lambda name: probes[name].missed)


async def _with_own_engines(
    broker: str, entry: ModelEntry, root: Path, bench: Bench, rounds: Rounds
) -> None:
    """Add rounds of a mesh with engines of its own, under the same loads."""
    async with (
        ProcessMesh(mesh_spec(broker, entry, root, ())) as mesh,
        meshed(mesh, MODEL) as arm,
    ):
        agents = agent_pids(mesh)
        for pid in agents:
            bench.cores.give_to_children(pid)
        own = Bench(
            arms={OWN: arm},
            slos=bench.slos,
            server_pids={OWN: agents},
            mesh_pids={},
            cores=bench.cores,
            sizes=bench.sizes,
            seed=bench.seed,
        )
        await own.serve(OWN, own.load(999, 2.0))
        for (share, number), arms in rounds.items():
            arms[OWN] = await own.serve(OWN, own.load(number, bench.rates[share]))
            say(f"own engines, {share:.0%}, seed {bench.seed + number}: {arms[OWN].missed:.0%}")


def report(
    result: Result, rounds: Rounds, pairs: Mapping[int, Sequence[Pair]], sizes: Sizes
) -> None:
    """
    Add figures and acceptance lines.

    Args:
        result: Result of the bench.
        rounds: Rounds of all arms.
        pairs: Number of open batch requests -> pairs of rounds.
        sizes: Sizes of the measurements.
    """
    for share in sizes.shares:
        of_share = [each for (at, _), each in rounds.items() if at == share]
        for name in of_share[0]:
            every = [each[name] for each in of_share]
            result.figures[f"missed at {share:.0%}, {name}"] = [round(e.missed, 3) for e in every]
            if name == ORACLE:  # it serves nothing else
                continue
            result.figures[f"missed at {share:.0%}, {name}, of what the oracle serves in time"] = [
                round(each[name].missed_of([not late for late in each[ORACLE].late]), 3)
                for each in of_share
            ]
            result.figures[f"Q2 missed at {share:.0%}, {name}"] = [
                round(each.missed_q2, 3) for each in every
            ]
            result.figures[f"batch tokens per CPU s at {share:.0%}, {name}"] = [
                round(each.batch_per_cpu_s, 1) for each in every
            ]
        result.figures[f"missed at {share:.0%}, oracle / better baseline"] = [
            round(each[ORACLE].missed / max(1e-9, _better(each).missed), 3) for each in of_share
        ]
        result.figures[f"mesh, cores at {share:.0%}"] = [
            round(each[OURS].mesh_cores, 2) for each in of_share
        ]
    for share in AT:
        ratios = [
            each[OURS].missed / max(1e-9, _better(each).missed)
            for (at, _), each in rounds.items()
            if at == share
        ]
        result.lines.append(
            Line(
                name=f"missed, headway / better baseline, where it misses {share:.0%}",
                value=statistics.median(ratios) if ratios else None,
                bound=MOST_MISSED_RATIO,
            )
        )
    for num_batch, each in pairs.items():
        result.figures[
            f"batch tokens per CPU s with {num_batch} open, better baseline / headway"
        ] = [round(_batch_ratio(*pair), 3) for pair in each]
    found = [_batch_ratio(_better(each), each[OURS]) for each in rounds.values()]
    found += [_batch_ratio(*pair) for pair in pairs.get(NUM_BATCH, ())]
    result.lines.append(
        Line(
            name="batch tokens per CPU second of the servers, better baseline / headway",
            value=statistics.median(found),
            bound=MOST_BATCH_RATIO,
        )
    )


def _batch_ratio(baseline: Round, ours: Round) -> float:
    """Batch tokens per CPU second of *baseline*, as a multiple of those of *ours*."""
    return baseline.batch_per_cpu_s / max(1e-9, ours.batch_per_cpu_s)


def _better(arms: Mapping[str, Round]) -> Round:
    """The round of the baseline that misses the fewest interactive targets."""
    return min(
        (each for name, each in arms.items() if name not in _NO_BASELINES),
        key=lambda each: each.missed,
    )
