"""`headway up --model` serves models of different makes with no file written by hand."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from ops.ports import free_port
from shared.contracts.base import ModelName
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models
from shared.models.tiny_adapter import TinyAdapter, make_tiny_adapter
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, QWEN
from tests.e2e.registry.makes import (
    embedder,
    with_sentencepiece,
    with_tools,
    with_vocabulary_and_merges,
)

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.vllm]

PATIENCE_S = 300.0
MESSAGES = [{"role": "user", "content": "The queue waits."}]
TOOL = {
    "type": "function",
    "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}},
}


@asynccontextmanager
async def up(broker: str, directory: Path, *arguments: str) -> AsyncIterator[str]:
    """`headway up` until the block ends; yields the gateway's URL."""
    port = free_port()
    log = directory / "up.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.mesh", "up", "--broker", broker, "--port", str(port),
            "--log-dir", str(directory / "log"), *arguments, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        await eventually(
            lambda: "ready:" in log.read_text() or process.returncode is not None,
            within_s=PATIENCE_S,
        )
        assert process.returncode is None, log.read_text()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()


async def test_models_of_five_makes_and_an_adapter_are_served(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path
) -> None:
    tiny = make_tiny_models(tmp_path / "tiny").parent
    sources = {
        "plain": tiny / LLAMA,
        "merges": with_vocabulary_and_merges(tiny / QWEN, tmp_path / "of-merges"),
        "sentencepiece": with_sentencepiece(tiny / LLAMA, tmp_path / "of-sentencepiece"),
        "tools": with_tools(tiny / QWEN, tmp_path / "with-tools"),
        "embedder": embedder(tiny / LLAMA, tmp_path / "embedder"),
    }
    named = [part for name, path in sources.items() for part in ("--model", f"{path}={name}")]
    adapter = make_tiny_adapter(tmp_path / "adapter", TinyAdapter(base=TINY_MODELS[LLAMA], seed=50))
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        engine = ("--engine", "vllm", "--agents", "1", "--max-model-len", "2048")
        async with (
            up(url, tmp_path, *engine, *named, "--adapter", f"plain={adapter}=sql") as base_url,
            openai.AsyncOpenAI(
                base_url=base_url, api_key="any", max_retries=0, timeout=PATIENCE_S
            ) as client,
        ):
            texts = [
                await client.completions.create(
                    model=name, prompt="The queue", max_tokens=8, temperature=0
                )
                for name in ("plain", "sql", "merges", "sentencepiece")
            ]
            assert [each.usage.completion_tokens for each in texts if each.usage] == [8] * 4
            assert len({each.choices[0].text for each in texts}) == 4
            answer = await client.chat.completions.create(
                model="tools", messages=MESSAGES, tools=[TOOL], max_tokens=8
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens > 30, "the template renders the tools"
            vector = await client.embeddings.create(model="embedder", input="The queue")
            assert len(vector.data[0].embedding) == 128

    path = tmp_path / "log" / "models.json"
    check_entries(path)
    checked = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.mesh", "models", "check", "--memory", "1GiB", "--registry",
        str(path),
    )  # fmt: skip
    assert await checked.wait() == 0, "vLLM refuses a model"


def check_entries(path: Path) -> None:
    """The entries that `up` has derived."""
    registry = ModelRegistry.load(path)
    tools = registry.entry(ModelName("tools"))
    assert (tools.tool_parser, tools.architecture) == ("hermes", "Qwen2ForCausalLM")
    assert registry.entry(ModelName("embedder")).task == "embed"
    for name in ("merges", "sentencepiece"):
        assert Path(registry.entry(ModelName(name)).path).parent == path.parent / "prepared"
    for base in registry.bases:
        entry = registry.entry(base)
        assert entry.max_model_len == 2048
