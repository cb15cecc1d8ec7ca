"""Tenants over two gateways, AMQP and three groupers: limits, keys, clamps and usage."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.mesh.cli import main
from services.mesh.processes import ProcessMesh
from shared.contracts.base import TenantId
from shared.contracts.qos import Slo
from shared.contracts.requests import Final, ReplyMode, RequestCompleted, RequestFailed
from shared.contracts.tenants.keys import ApiKey, Scope
from shared.contracts.tenants.usage import UsageReported, UsageRequested
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_OK
from shared.tenants.keys import key_edit
from shared.tenants.usage_questions import ask_usage
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, is_ready, mesh_spec, producer_of, request, second_gateway

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]

LIMIT, HIGH_LIMIT = 40, 6000
POLICIES: dict[str, Any] = {
    "tenants": {
        "limited": {"requests_per_minute": LIMIT},
        "roomy": {"requests_per_minute": HIGH_LIMIT},
        "batch": {"classes": ["non_interactive", "best_effort"], "high_importance": False},
        "strict": {"min_ttft_s": 1.0, "strict": True},
    }
}
BODY: dict[str, Any] = {"model": LLAMA, "prompt": "queues", "max_tokens": 4}


@dataclass(frozen=True)
class Rig:
    """A mesh with two gateways, and a key of each tenant."""

    mesh: ProcessMesh
    urls: tuple[str, str]
    keys_file: Path
    keys: dict[str, tuple[ApiKey, str]]

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant][1]}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    directory = tmp_path_factory.mktemp("tenants")
    policies, keys_file = directory / "tenants.json", directory / "keys.json"
    policies.write_text(json.dumps(POLICIES))
    now = SystemClock().now()
    with key_edit(keys_file) as edit:
        keys = {
            name: edit.create(
                tenant=TenantId(name), scopes=(Scope(scope),), now=now, lifetime_s=None
            )
            for name, scope in (
                *((name, "inference") for name in (*POLICIES["tenants"], "revoked", "free")),
                ("operator", "operator"),
            )
        }
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            directory,
            agents=1,
            groupers=3,
            gateway={"keys_file": str(keys_file)},
            estimator={"usage_dir": str(directory / "usage")},
            tenants=policies,
        )
        async with (
            ProcessMesh(spec) as mesh,
            second_gateway(spec, directory) as (second, second_url),
        ):
            await eventually(lambda: is_ready(second, second_url))
            yield Rig(mesh, (spec.gateway_url, second_url), keys_file, keys)


async def test_all_doors_together_admit_the_limit(rig: Rig) -> None:
    """At most the limit is admitted of 4x as many requests through two gateways and AMQP."""
    async with httpx.AsyncClient(timeout=60.0) as client, producer_of(rig.mesh) as producer:

        async def over_http(number: int) -> httpx.Response:
            url = f"{rig.urls[number % 2]}/v1/completions"
            return await client.post(url, json=BODY, headers=rig.headers("limited"))

        async def over_amqp(number: int) -> Final:
            body = request(number, max_tokens=4, tenant="limited")
            generation = await producer.submit(body, reply=ReplyMode.FINAL)
            return await generation.final()

        number = 4 * LIMIT // 3
        answers, finals = await asyncio.gather(
            asyncio.gather(*(over_http(n) for n in range(2 * number))),
            asyncio.gather(*(over_amqp(n) for n in range(number))),
        )

    statuses = Counter(answer.status_code for answer in answers)
    completed = sum(isinstance(final, RequestCompleted) for final in finals)
    print("over HTTP", dict(statuses), "over AMQP", completed, "of", len(finals))
    assert 0.9 * LIMIT <= statuses[200] + completed <= LIMIT
    assert set(statuses) <= {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "requests_per_minute of tenant 'limited'" in refused.json()["error"]["message"]
    assert refused.headers["x-ratelimit-limit-requests"] == str(LIMIT)
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    over = [final for final in finals if isinstance(final, RequestFailed)]
    assert {(final.error.status, final.error.code) for final in over} <= {
        (429, "rate_limit_exceeded")
    }
    assert all((final.error.retry_after_s or 0) > 0 for final in over)


async def test_an_answer_has_the_limits_of_its_tenant(rig: Rig) -> None:
    """From each gateway; a tenant without limits gets no such headers."""
    async with httpx.AsyncClient(timeout=60.0) as client:

        async def answers(tenant: str) -> list[httpx.Response]:
            headers = rig.headers(tenant)
            urls = [f"{url}/v1/completions" for url in rig.urls]
            return [await client.post(url, json=BODY, headers=headers) for url in urls]

        free, roomy = await answers("free"), await answers("roomy")

    assert {answer.status_code for answer in (*free, *roomy)} == {200}
    for answer in free:
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    for answer in roomy:
        assert answer.headers["x-ratelimit-limit-requests"] == str(HIGH_LIMIT)
        assert 0 <= int(answer.headers["x-ratelimit-remaining-requests"]) <= HIGH_LIMIT


async def test_a_claim_beyond_the_policy_is_clamped_and_said_so(rig: Rig) -> None:
    """Over HTTP in a header and in the answer, over AMQP in the final."""
    body = BODY | {"slo": {"ttft_s": 0.05}, "importance": "high"}
    said = "class=interactive->non_interactive, importance=high->low"
    async with httpx.AsyncClient(timeout=60.0) as client, producer_of(rig.mesh) as producer:
        url = f"{rig.urls[1]}/v1/completions"
        whole = await client.post(url, json=body, headers=rig.headers("batch"))
        streamed = await client.post(
            url, json=body | {"stream": True}, headers=rig.headers("batch")
        )
        slo = Slo(ttft_s=0.05)
        generation = await producer.submit(
            request(0, max_tokens=4, tenant="batch", slo=slo), reply=ReplyMode.FINAL
        )
        final = await generation.final()

    assert (whole.headers["x-headway-clamped"], streamed.headers["x-headway-clamped"]) == (
        said,
        said,
    )
    assert [each["field"] for each in whole.json()["headway"]["clamped"]] == ["class", "importance"]
    assert isinstance(final, RequestCompleted)
    assert [str(each) for each in final.clamped] == ["class=interactive->non_interactive"]


async def test_a_strict_policy_refuses(rig: Rig) -> None:
    """403 names the target; without a claim the request is served."""
    async with httpx.AsyncClient(timeout=60.0) as client:
        url = f"{rig.urls[0]}/v1/completions"
        headers = rig.headers("strict")
        refused = await client.post(url, json=BODY | {"slo": {"ttft_s": 0.05}}, headers=headers)
        served = await client.post(url, json=BODY, headers=headers)

    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "target_not_allowed")
    assert refused.json()["error"]["param"] == "slo.ttft_s"
    assert served.status_code == 200


async def test_a_revoked_key_is_refused_by_all_gateways(rig: Rig) -> None:
    """The key works at first; when it is revoked, each gateway answers 401."""
    entry, _ = rig.keys["revoked"]
    async with httpx.AsyncClient(timeout=60.0) as client:

        async def status(url: str) -> int:
            headers = rig.headers("revoked")
            return (await client.get(f"{url}/v1/models", headers=headers)).status_code

        assert [await status(url) for url in rig.urls] == [200, 200]
        with key_edit(rig.keys_file) as edit:
            edit.revoke(entry.id, SystemClock().now())
        for url in rig.urls:

            async def is_refused(url: str = url) -> bool:
                return await status(url) == 401

            await eventually(is_refused, within_s=10.0)


async def test_usage_equals_the_sum_of_finals_and_is_private(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the token; a tenant sees its own rows, an operator's key all of them."""
    async with httpx.AsyncClient(timeout=60.0) as client, producer_of(rig.mesh) as producer:
        generations = [
            await producer.submit(
                request(number, max_tokens=3 + number, tenant="counted"), reply=ReplyMode.FINAL
            )
            for number in range(12)
        ]
        finals = [await generation.final() for generation in generations]
        usages = [final.usage for final in finals if isinstance(final, RequestCompleted)]
        url, free = f"{rig.urls[0]}/v1/usage", rig.headers("free")
        served = await client.post(f"{rig.urls[0]}/v1/completions", json=BODY, headers=free)
        assert served.status_code == 200

        async def tenants(headers: dict[str, str], **params: str) -> set[str]:
            """Tenants whose rows the answer has."""
            answer = await client.get(url, params=params | {"by": "tenant"}, headers=headers)
            assert answer.status_code == 200
            return {row["tenant"] for row in answer.json()["data"]}

        async def is_counted() -> bool:
            return bool(await tenants(free))

        await eventually(is_counted)
        async with rig.mesh.open_broker("usage") as broker:

            async def counted() -> UsageReported | None:
                tenant = TenantId("counted")
                return await ask_usage(
                    broker, lambda reply_to: UsageRequested(reply_to=reply_to, tenant=tenant)
                )

            async def is_complete() -> bool:
                found = await counted()
                return found is not None and any(
                    row.requests.get("completed") == len(usages) for row in found.rows
                )

            await eventually(is_complete)
            found = await counted()
        own = await tenants(free)
        others = await client.get(url, params={"tenant": "counted"}, headers=free)
        every = await tenants(rig.headers("operator"), tenant="*")

    assert len(usages) == 12
    assert found is not None
    (row,) = found.rows
    assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens) == (
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
    command = ["usage", "--amqp-url", rig.mesh.spec.broker, "--json", "--tenant", "counted"]
    capsys.readouterr()
    assert await asyncio.to_thread(main, command) == EXIT_OK
    (printed,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["tenant"] == "counted"
    assert printed["total_tokens"] == sum(usage.total_tokens for usage in usages)
    assert own == {"free"}
    assert (others.status_code, others.json()["error"]["code"]) == (404, "tenant_not_found")
    assert every >= {"counted", "free"}
