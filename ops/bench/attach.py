"""
A mesh in front of two stock `vllm serve`, against clients that choose the server themselves.

Interactive requests (Q1), requests with a limit for the whole answer (Q2) and batch requests share
the servers; a fixed number of batch requests is always open. Targets are fixed multiples of the
times of unloaded servers. The load is the one at which clients that choose the least loaded server,
with vLLM's `priority`, miss a given share of the interactive targets in the mean over the seeds;
then all arms serve it one after another: the mesh, and round robin and least loaded, each with and
without `priority`. The speed of a machine varies between two arms, so the batch work of the mesh is
compared with that of one baseline in further pairs of rounds, one directly after the other, in
alternating order.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from ops.bench.attach_arms import (
    Arm,
    Balanced,
    mesh_spec,
    meshed,
    stock_servers,
)
from ops.bench.attach_report import Pair, Rounds, batch_ratio, report
from ops.bench.attach_rounds import (
    ORACLE,
    OURS,
    OWN,
    Bench,
    Sizes,
)
from ops.bench.cores import agent_pids, apart_from_engines
from ops.bench.engine_load import planned_load
from ops.bench.progress import say
from ops.bench.result import Result
from ops.environment import broker_for
from ops.sim.attached.fronts import BATCH, INTERACTIVE, PRIORITIES
from ops.sim.attached.outcomes import Outcome
from services.agent.backends.remote.server import Server
from services.agent.backends.settings import RemoteSettings
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from services.mesh.processes import ProcessMesh
from services.mesh.spec import EMBEDDED
from shared.contracts.base import ModelName
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
MULTIPLES = {"ttft": 10.0, "tbt": 10.0, "Q2": 20.0}
"""Ratio of each target to the median of its time on the unloaded server."""
MISSED = (0.3, 0.4, 0.5)
"""Shares of interactive targets that a baseline misses, which determine the loads."""
SEARCHED = "least loaded, priority"
"""Baseline with which the loads are found; the report names the one with the fewest misses."""


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
            await bench.serve(OURS, bench.load(999, 2.0))  # warm-up
            rounds = await _compared(bench)
            pairs = await _paired(bench)
        if not quick:
            await _with_own_engines(url, entry, root, bench, rounds)
    report(result, rounds, pairs, sizes.shares)
    return result


def _baselines(servers: Sequence[Server]) -> dict[str, Arm]:
    """Clients that choose the server, with and without priorities."""
    return {
        f"{'least loaded' if least else 'round robin'}{', priority' if priorities else ''}": (
            Balanced(servers=servers, model=MODEL, least_loaded=least, priorities=priorities)
        )
        for least in (False, True)
        for priorities in (None, PRIORITIES)
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


async def _compared(bench: Bench) -> Rounds:
    """Find the loads with one baseline, and let all arms serve them in turns."""
    rounds = Rounds()
    for share in bench.sizes.shares:
        rate_rps = bench.rates[share] = await bench.rate(SEARCHED, share)
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


async def _paired(bench: Bench) -> list[Pair]:
    """Let one baseline and the mesh serve loads of other seeds, one after the other."""
    pairs = []
    for share, rate_rps in bench.rates.items():
        for number in range(bench.sizes.pairs):
            load = bench.load(bench.sizes.seeds + number, rate_rps)
            names = (SEARCHED, OURS) if number % 2 == 0 else (OURS, SEARCHED)
            served = {name: await bench.serve(name, load) for name in names}
            pair = served[SEARCHED], served[OURS]
            pairs.append(pair)
            say(f"{share:.0%}, batch tokens of a pair: {batch_ratio(*pair):.3f}")
    return pairs


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
