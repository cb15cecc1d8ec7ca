"""An agent whose model files differ from the gateway's does not serve that model."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.mesh.processes import ProcessMesh
from shared.models.tiny import make_tiny_models
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, QWEN, mesh_spec

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.vllm]
NUM_REQUESTS = 40


def with_other_template(directory: Path) -> Path:
    """A registry like the gateway's; the model `LLAMA` has another chat template."""
    registry = make_tiny_models(directory, weights=False)
    entry = next(m for m in json.loads(registry.read_text())["models"] if m["name"] == LLAMA)
    file = directory / entry["path"] / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ messages }}"}))
    return registry


async def test_an_equal_agent_serves_all_requests_of_the_model(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path
):
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(url, tmp_path, gateway={"front": "vllm"})
        equal, other = spec.agents
        settings = other.settings | {"registry": str(with_other_template(tmp_path / "other"))}
        other = msgspec.structs.replace(other, settings=settings)
        spec = msgspec.structs.replace(spec, agents=(equal, other))
        async with (
            ProcessMesh(spec) as mesh,
            httpx.AsyncClient(base_url=spec.gateway_url, timeout=60.0) as http,
        ):

            async def models() -> dict[str, Any]:
                found: dict[str, Any] = (await http.get("/health")).json()["models"]
                return found

            async def is_named() -> bool:
                return (await models())[LLAMA]["differing"] == [other.instance_id]

            await eventually(is_named)
            asked = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
            chosen = [LLAMA, QWEN] * (NUM_REQUESTS // 2)
            answers = await asyncio.gather(
                *(
                    http.post("/v1/chat/completions", json=asked | {"model": model})
                    for model in chosen
                )
            )
            log = mesh.processes[f"agent-{other.instance_id}"].log_file.read_text().splitlines()
            taken = [line for line in log if '"event":"request.' in line]

            assert {answer.status_code for answer in answers} == {200}
            assert {
                answer.json()["headway"]["instance"]
                for answer, model in zip(answers, chosen, strict=True)
                if model == LLAMA
            } == {equal.instance_id}
            # The other agent has neither ended a request of the model nor handed one on.
            assert [line for line in taken if f'"model":"{LLAMA}"' in line] == []
            assert (await models())[QWEN]["differing"] == []
            assert (await models())[QWEN]["able"] == 2
