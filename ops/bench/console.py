"""
The console in a real browser, with many lanes and instances.

A gateway's console shows a large plan that changes with each frame. Every keystroke in the filter
and every change of the view is timed from the input to the picture after it.
"""

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from ops.bench.result import Line, Result
from ops.browser import opened
from ops.ports import free_port
from services.gateway.console.application import WithConsole
from services.gateway.console.sessions import Sessions
from services.gateway.console.watching import MeshWatch
from services.gateway.tenants import Tenants
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.contracts.base import InstanceId, ModelName, Seconds
from shared.contracts.plans import PlacedGroup, PlanExplained
from shared.contracts.telemetry import InstanceStatus, LsoExecuted
from shared.runtime.clock import SystemClock
from shared.runtime.health import serve_http

NUM_LANES, NUM_INSTANCES, NUM_LSOS = 400, 80, 200
CHANGE_PERIOD_S: Seconds = 0.5
MOST_PAINT_MS = 100.0
TOKEN = "token-of-the-bench"
TEXT = "lane.m3.high"
_TIMED = """
async ([selector, text]) => {
  const input = document.querySelector(selector);
  const times = [];
  for (let end = 0; end <= text.length; end++) {
    const begun = performance.now();
    input.value = text.slice(0, end);
    input.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - begun);
    await new Promise((done) => setTimeout(done, 50));
  }
  return times;
}
"""
"""Types a text, and returns the time from each input to the end of the frame after it."""
_VIEWED = """
async ([view, selector]) => {
  const begun = performance.now();
  location.hash = view;
  while (!document.querySelector(selector)) {
    await new Promise((done) => requestAnimationFrame(done));
  }
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - begun;
}
"""
"""Opens a view, and returns the time until its content is painted."""


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; it needs Chromium and no broker."""
    del broker
    result = Result(name="console", seed=seed, quick=quick)
    random = np.random.default_rng(seed)
    stop = asyncio.Event()
    async with MemoryBroker(MemoryHub(), client_name="bench") as memory:
        watch = MeshWatch(memory, SystemClock())
        application = WithConsole(
            watch=watch,
            broker=memory,
            tenants=Tenants(
                api_keys={}, default_tenant="d", trust_fairness_header=False, max_outstanding=1
            ),
            sessions=Sessions(TOKEN),
            stop=stop,
            front=None,
        )
        port = free_port()
        changing = asyncio.create_task(_change(watch, random, stop))
        async with (
            serve_http(application, host="127.0.0.1", port=port),
            opened(f"http://127.0.0.1:{port}/console?token={TOKEN}#queues") as shown,
        ):
            page = shown.page
            await page.locator("tbody tr").first.wait_for()
            inputs: list[float] = []
            for _ in range(3 if quick else 20):
                inputs += await page.evaluate(_TIMED, ["#filter", TEXT])
            views = await _views(page, 3 if quick else 20)
            stop.set()
        await changing
    result.figures |= {
        "lanes": NUM_LANES,
        "instances": NUM_INSTANCES,
        "inputs": len(inputs),
        "input to paint p50, ms": statistics.median(inputs),
        "change of the view p50, ms, with the wait for its first frame": statistics.median(views),
    }
    result.lines.append(
        Line(
            name="input to paint p95, ms",
            value=float(np.quantile(inputs, 0.95)),
            bound=MOST_PAINT_MS,
        )
    )
    result.lines.append(
        Line(name="errors in the browser", value=float(len(shown.problems)), bound=0.0)
    )
    return result


async def _views(page: Any, turns: int) -> Sequence[float]:
    selectors = {"instances": "td.good", "overview": "dl.figures", "queues": "#filter"}
    return [
        await page.evaluate(_VIEWED, [view, selector])
        for _ in range(turns)
        for view, selector in selectors.items()
    ]


async def _change(watch: MeshWatch, random: np.random.Generator, stop: asyncio.Event) -> None:
    """Fill *watch* with changing content until *stop*."""
    epoch = 0
    while not stop.is_set():
        epoch += 1
        now = watch.clock.now()
        watch.since = watch.since or now
        watch.plan, watch.plan_at = _plan(epoch, now, random), now
        for number in range(NUM_INSTANCES):
            watch.statuses[_instance(number)] = (now, _status(number, now, random))
        while len(watch.lsos) < NUM_LSOS:
            watch.lsos.append(_lso(len(watch.lsos), now))
        watch.lsos.append(_lso(epoch, now))
        await asyncio.sleep(CHANGE_PERIOD_S)


def _plan(epoch: int, now: float, random: np.random.Generator) -> PlanExplained:
    waits_s = random.exponential(60.0, NUM_LANES)
    left_s = waits_s * random.uniform(0.5, 4.0, NUM_LANES)
    groups = tuple(
        PlacedGroup(
            lane=f"lane.m{number % 8}.high.{number}",
            number=epoch,
            num_requests=int(random.integers(1, 64)),
            instance_id=_instance(number % NUM_INSTANCES),
            position=number // NUM_INSTANCES,
            wait_s=float(waits_s[number]),
            wait_sd_s=float(waits_s[number] / 4),
            time_left_s=float(left_s[number]),
            late_probability=float(waits_s[number] > left_s[number]),
        )
        for number in range(NUM_LANES)
    )
    return PlanExplained(epoch=epoch, at=now, leader_id="planner-0", policy="qlm", groups=groups)


def _status(number: int, now: float, random: np.random.Generator) -> InstanceStatus:
    return InstanceStatus(
        instance_id=_instance(number),
        incarnation="i",
        seq=1,
        at=now,
        engine="simulated",
        device="bench",
        model=ModelName(f"m{number % 8}"),
        running=int(random.integers(0, 64)),
        max_running=64,
        kv_utilization=float(random.random()),
    )


def _lso(number: int, now: float) -> LsoExecuted:
    return LsoExecuted(
        instance_id=_instance(number % NUM_INSTANCES),
        at=now,
        lso="evict",
        outcome="done",
        subject=f"{1 + number % 4} requests",
        reason="the head of the window needs room",
    )


def _instance(number: int) -> InstanceId:
    return InstanceId(f"instance-{number:02}")
