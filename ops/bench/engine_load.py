"""Open-loop load on one engine, with mixed targets and a seed, and the share of misses."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ops.engine_runs import generate
from ops.sim.lengths import CODE
from services.agent.backends.base import EngineBackend, EngineRequest
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import Sampling, Tokens

CLASSES = ("Q1", "Q2", "Q3")
"""Request classes (interactive, short TTLT, long TTLT), each with a third of the requests."""
_PROMPT_SCALE = 0.3
"""Scale factor of the code mix's prompt lengths, so that the prompts fit a small model on a CPU."""
_MAX_OUTPUT = 64
_FIRST_TOKEN, _VOCABULARY = 10, 500


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a load."""

    at_s: Seconds
    """Time of the request in seconds after the start of the load."""
    class_name: str
    prompt: Tokens
    output_tokens: int


@dataclass(slots=True)
class Served:
    """Outcome of one request of a load."""

    planned: Planned
    slo: Slo
    arrived_at: float
    token_ids: Tokens = ()
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished: bool = False

    @property
    def missed(self) -> bool:
        """True if the first or the last token was later than its deadline (QoServe eqs 1-3)."""
        if not self.finished or self.first_token_at is None or self.last_token_at is None:
            return True
        count = len(self.token_ids)
        last_late = self.last_token_at > self.slo.token_deadline_at(self.arrived_at, count)
        if self.slo.qos_class is not QosClass.INTERACTIVE:
            return last_late
        return last_late or self.first_token_at > self.slo.token_deadline_at(self.arrived_at, 1)


def planned_load(*, seed: int, rate_rps: float, duration_s: Seconds) -> list[Planned]:
    """Poisson arrivals with the lengths of the code mix, scaled down."""
    # Separate random streams: a different rate changes the arrivals' times and number only.
    gaps, prompts_of, outputs_of, classes, random = np.random.default_rng(seed).spawn(5)
    size = int(3 * rate_rps * duration_s) + 16
    times = np.cumsum(gaps.exponential(size=size)) / rate_rps
    times = times[times < duration_s]
    prompts = CODE.prompt.draw(prompts_of, len(times))
    outputs = CODE.output.draw(outputs_of, len(times))
    chosen = classes.integers(0, len(CLASSES), len(times))
    return [
        Planned(
            at_s=float(at),
            class_name=CLASSES[index],
            prompt=tuple(
                random.integers(
                    _FIRST_TOKEN, _VOCABULARY, max(8, int(_PROMPT_SCALE * prompt))
                ).tolist()
            ),
            output_tokens=min(_MAX_OUTPUT, output),
        )
        for at, index, prompt, output in zip(times, chosen, prompts, outputs, strict=True)
    ]


async def serve(
    engine: EngineBackend,
    model: ModelName,
    load: Sequence[Planned],
    slos: Mapping[str, Slo],
    *,
    priorities: Mapping[str, int] | None = None,
    patience_s: Seconds = 0.0,
) -> list[Served]:
    """
    Send *load* as planned; abort requests that are unfinished *patience_s* after the last arrival.

    Args:
        engine: Engine on which *model* is active.
        load: Requests in order of time.
        slos: SLO of each class; a missing class is best effort.
        priorities: Priority of each class, for an engine with its own priorities.
        patience_s: Waiting time after the last arrival.
    """
    begun, begun_at = time.perf_counter(), time.time()
    served = [
        Served(planned, slos.get(planned.class_name, Slo()), begun_at + planned.at_s)
        for planned in load
    ]
    async with asyncio.TaskGroup() as group:
        for index, each in enumerate(served):
            await asyncio.sleep(max(0.0, begun + each.planned.at_s - time.perf_counter()))
            priority = (priorities or {}).get(each.planned.class_name, 0)
            request = _request(model, f"load-{begun_at}-{index}", each, priority)
            group.create_task(_serve_one(engine, request, each))
        last_s = load[-1].at_s if load else 0.0
        while not all(each.finished for each in served):
            if time.perf_counter() > begun + last_s + patience_s:
                for index, each in enumerate(served):
                    if not each.finished:
                        engine.abort(RequestId(f"load-{begun_at}-{index}"))
                break
            await asyncio.sleep(0.05)
    return served


async def serve_alone(
    engine: EngineBackend, model: ModelName, load: Sequence[Planned]
) -> list[Served]:
    """Serve the requests of *load* one after another."""
    served = []
    for index, planned in enumerate(load):
        each = Served(planned, Slo(), time.time())
        await _serve_one(engine, _request(model, f"alone-{each.arrived_at}-{index}", each, 0), each)
        served.append(each)
    return served


def missed_share(served: Sequence[Served]) -> float:
    """Share of requests with a missed target among all requests that arrived."""
    return sum(each.missed for each in served) / max(1, len(served))


def _request(model: ModelName, name: str, each: Served, priority: int) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        model=model,
        prompt=each.planned.prompt,
        sampling=Sampling(max_tokens=each.planned.output_tokens, temperature=0.0, ignore_eos=True),
        slo=each.slo,
        arrived_at=each.arrived_at,
        application=each.planned.class_name,
        priority=priority,
    )


async def _serve_one(engine: EngineBackend, request: EngineRequest, each: Served) -> None:
    token_ids: list[int] = []
    async for output in generate(engine, request):
        now = time.time()
        if output.token_ids:
            each.first_token_at = each.first_token_at or now
            each.last_token_at = now
            token_ids += output.token_ids
        each.finished = each.finished or output.finish_reason is not None
    each.token_ids = tuple(token_ids)
