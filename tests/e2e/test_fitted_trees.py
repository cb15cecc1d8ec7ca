"""Routers' predictions become samples, samples become trees, and routers predict with the trees."""

import asyncio
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest

from services.estimator.trees.sample_files import read_samples
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.listening import listening
from shared.contracts.base import Decoder
from shared.contracts.qos import Slo
from shared.contracts.requests import RequestCompleted
from shared.contracts.routing import RouterState
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, ask_all, mesh_spec, producer_of, request

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]

CHAT = Slo(ttft_s=30.0)
decode: Decoder[RouterState] = Decoder(RouterState)
COUNT, LEAST = 800, 500
"""
Number of requests, and of samples for a fit; on a busy machine some requests give no sample.
"""


def num_samples(profile_dir: Path) -> int:
    found = read_samples(profile_dir / "samples", most=COUNT)
    return sum(len(each.prefill_s) for each in found.by_key.values())


async def test_routers_predict_with_trees_fitted_to_served_requests(
    rabbit_servers: Callable[[str], RabbitServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile_dir = tmp_path / "profiles"
    monkeypatch.setenv("HEADWAY_ESTIMATOR_PROFILE_DIR", str(profile_dir))
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            tmp_path,
            planner={"grouper": {"routing": {"policy": "default", "max_waiting": 1000}}},
        )
        async with ProcessMesh(spec) as mesh, producer_of(mesh) as producer:
            answers = await ask_all(
                producer,
                [
                    request(n, max_tokens=2, slo=CHAT, prompt=f"{n} " * (1 + n % 97))
                    for n in range(COUNT)
                ],
                spacing_s=0.02,
                timeout_s=240.0,
            )
            assert [type(each.final) for each in answers] == [RequestCompleted] * COUNT
            await eventually(lambda: num_samples(profile_dir) >= LEAST, within_s=60.0)

            fit = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.estimator", "fit", "--json",
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await fit.communicate()
            assert fit.returncode == 0
            report = msgspec.json.decode(out)
            assert (report["model"], report["outcome"]) == (LLAMA, "written")
            assert report["samples"] >= LEAST

            def adopted() -> bool:
                log = (tmp_path / "log" / "grouper-0.log").read_text()
                return '"trees.adopted"' in log

            await eventually(adopted, within_s=30.0)
            states: list[RouterState] = []
            numbers = count(COUNT)

            async def is_predicted() -> bool:
                """Whether a prediction of the trees was compared with a request's prefill."""
                more = request(next(numbers), max_tokens=2, slo=CHAT)
                (answer,) = await ask_all(producer, [more])
                assert isinstance(answer.final, RequestCompleted)
                return any(
                    trust.version.startswith(f"trees v{report['version']} ") and trust.count > 0
                    for state in states
                    for trust in state.trusts
                )

            async with (
                mesh.open_broker("headway-onlooker") as broker,
                listening(
                    broker,
                    topology.temporary_queue("onlooker"),
                    decode,
                    [(topology.TELEMETRY, topology.ROUTER_KEY)],
                    states.append,
                ),
            ):
                await eventually(is_predicted)
