"""vLLM's engine core reads images, also of answers that another engine continues."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_IMAGE_MODELS, make_tiny_models
from tests.contract.calls.call_engines import CallRig
from tests.contract.engine.engines import vllm_rig
from tests.image_bodies import CHAT, MAKERS, MESSAGES, RESPONSES, chat_body, data_url

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
(MODEL,) = map(ModelName, TINY_IMAGE_MODELS)
ONE, OTHER = (data_url(1),), (data_url(2),)
Rigs = tuple[CallRig, CallRig]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rigs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rigs]:
    """Two engines of one model, with the default policy."""
    directory = tmp_path_factory.mktemp("images")
    vllm_rig(directory)  # skips or fails without vLLM
    registry = make_tiny_models(directory, models=TINY_IMAGE_MODELS)
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(_rig(registry, directory / f"{name}.log"))
            for name in ("one", "other")
        ]
        yield one, other


@asynccontextmanager
async def _rig(registry: Path, log: Path) -> AsyncIterator[CallRig]:
    entry = ModelRegistry.load(registry).entry(MODEL)
    engine = VllmEngine((entry,), VllmSettings(log_path=str(log)))
    try:
        await engine.start()
        await engine.activate(MODEL)
        yield CallRig(engine, MODEL)
    finally:
        await engine.close()


def without_counts(response: Any) -> Any:
    """*response* without the cached tokens, which depend on earlier requests."""
    return {name: value for name, value in response.items() if name != "usage"}


async def text(rig: CallRig, parts: list[Any]) -> str:
    (choice,) = (await rig.response(CHAT, chat_body(parts)))["choices"]
    return str(choice["message"]["content"])


async def test_answer_depends_on_each_image_and_its_place(rigs: Rigs):
    bodies: list[list[Any]] = [
        ["hello"],
        ["hello", ONE],
        ["hello", OTHER],
        [ONE, "hello"],
        ["hello", ONE, OTHER],
        ["hello", OTHER, ONE],
    ]
    texts = [await text(rigs[0], parts) for parts in bodies]

    assert len(set(texts)) == len(texts)
    assert [await text(rigs[0], parts) for parts in bodies] == texts


async def test_images_of_simultaneous_requests_are_not_confused(rigs: Rigs):
    bodies: list[list[Any]] = [["hello", (data_url(seed),)] for seed in range(8)]
    alone = [await text(rigs[0], parts) for parts in bodies]
    together = await asyncio.gather(*(text(rigs[1], parts) for parts in bodies))

    assert together == alone


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("cut", [1, 5, 11])
async def test_image_sent_twice_is_the_same_after_another_engine_continues(
    rigs: Rigs, endpoint: str, cut: int
):
    one, other = rigs
    body = MAKERS[endpoint](["first", ONE, "second", ONE, "which?"])
    for rig in rigs:
        await rig.engine.clear_caches()
    whole = await one.response(endpoint, body)
    evicted = await one.ask(endpoint, body, cut_after=cut)
    assert evicted.response is None
    continued = await other.response(endpoint, body, evicted.progress().children)

    assert without_counts(continued) == without_counts(whole)


async def test_id_of_an_image_that_the_client_chooses_reads_no_other_image(rigs: Rigs):
    def body(image: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": image}, "uuid": "same"}
        return chat_body([]) | {"messages": [{"role": "user", "content": [part]}]}

    responses = [await rigs[0].response(CHAT, body(data_url(seed))) for seed in (1, 2)]
    (one, other) = (each["choices"][0]["message"]["content"] for each in responses)

    assert one != other


@pytest.mark.parametrize(
    ("part", "param", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url", "file"),
        (
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}},
            "image_url",
            "allowed_media_hosts",
        ),
        (
            {
                "type": "image_url",
                "image_url": {"url": data_url(1, width=4001, height=4000, plain=True)},
            },
            "image_url",
            "limit is 16000000 pixels",
        ),
        ({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA=="}}, "audio", ""),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}, "video", ""),
        ({"type": "image_url", "image_url": None, "uuid": "same"}, None, ""),
    ],
    ids=["file", "remote", "pixels", "audio", "video", "without data"],
)
async def test_other_media_are_refused_by_name(
    rigs: Rigs, part: dict[str, Any], param: str | None, reason: str
):
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
    with pytest.raises(ContractError) as refused:
        await rigs[0].ask(CHAT, body)

    assert refused.value.status == 400
    assert reason in str(refused.value)
    if param is not None:
        assert refused.value.param == param


async def test_too_many_images_are_refused(rigs: Rigs):
    with pytest.raises(ContractError, match="limit is 8") as refused:
        await rigs[0].ask(CHAT, chat_body([ONE] * 9))

    assert (refused.value.status, refused.value.param) == (400, "image_url")
    assert await text(rigs[0], [ONE] * 8)
