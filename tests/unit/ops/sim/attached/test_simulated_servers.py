"""Stock servers of vLLM in virtual time."""

from dataclasses import dataclass, field

import pytest

from ops.sim.attached.servers import MAX_RUNNING, Device, Server, ServerRun
from ops.sim.attached.timeline import Timeline
from shared.contracts.base import UnixTime
from shared.contracts.estimates import LatencyCoefficients

LATENCY = LatencyCoefficients(constant_s=0.01, linear_s=0.001)


@dataclass
class Rig:
    """Servers on one device, and the times of all tokens."""

    timeline: Timeline = field(default_factory=Timeline)
    device: Device = field(init=False)
    token_times: dict[str, list[UnixTime]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = Device(self.timeline)

    def server(self) -> Server:
        return Server(self.timeline, self.device, LATENCY)

    def submit(
        self, server: Server, name: str, *, prompt: int = 100, output: int = 1, priority: int = 0
    ) -> ServerRun:
        times = self.token_times.setdefault(name, [])
        run = ServerRun(
            prompt_tokens=prompt,
            output_tokens=output,
            priority=priority,
            on_token=lambda _number: times.append(self.timeline.now),
        )
        server.submit(run)
        return run


def test_first_token_comes_after_the_prefill_and_each_further_one_after_an_iteration() -> None:
    rig = Rig()
    rig.submit(rig.server(), "a", prompt=100, output=3)
    rig.timeline.run(1.0)
    assert rig.token_times["a"] == pytest.approx([0.11, 0.121, 0.132])


def test_long_prompts_are_computed_in_parts_beside_decodes() -> None:
    rig = Rig()
    server = rig.server()
    rig.submit(server, "short", prompt=48, output=2)
    rig.submit(server, "long", prompt=2500)
    rig.timeline.run(10.0)
    first_s = 0.01 + 0.048  # the first iteration began before the long prompt came
    second_s = first_s + 0.01 + 2.048
    assert rig.token_times["short"] == pytest.approx([first_s, second_s])
    assert rig.token_times["long"] == pytest.approx([second_s + 0.01 + 0.453])


def test_two_busy_servers_share_the_device() -> None:
    rig = Rig()
    rig.submit(rig.server(), "a", prompt=90)
    rig.submit(rig.server(), "b", prompt=190)
    rig.timeline.run(1.0)
    assert rig.token_times["a"] == pytest.approx([0.2])  # half the speed
    assert rig.token_times["b"] == pytest.approx([0.3])  # full speed from then on
    assert rig.device.busy_s == pytest.approx(0.3)


def test_waiting_requests_begin_in_order_of_priority() -> None:
    rig = Rig()
    server = rig.server()
    for number in range(MAX_RUNNING):
        rig.submit(server, f"running {number}", output=10 + number)  # they end one by one
    rig.submit(server, "late", priority=1)
    rig.submit(server, "urgent", priority=0)
    assert server.num_waiting == MAX_RUNNING + 1  # the first one runs alone
    for number in range(MAX_RUNNING):
        rig.submit(server, f"later {number}", priority=2)
    rig.timeline.run(60.0)
    assert rig.token_times["urgent"] < rig.token_times["late"] < rig.token_times["later 0"]


def test_aborted_request_gets_no_more_tokens() -> None:
    rig = Rig()
    server = rig.server()
    run = rig.submit(server, "a", output=100)
    rig.submit(server, "b", output=3)
    rig.timeline.run(0.13)
    server.abort(run)
    before = len(rig.token_times["a"])
    rig.timeline.run(10.0)
    assert len(rig.token_times["a"]) == before
    assert len(rig.token_times["b"]) == 3
