"""vLLM's reader of media with the mesh's limits, and the engine host's checks of images."""

import asyncio
import base64
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY
from vllm.v1.engine import EngineCoreRequest

from services.agent.backends.vllm.host.images import checked_images
from services.engine_core.encoding import decode_request, encode_request
from services.engine_core.media import ImageReads, current_reads, limit_media
from shared.contracts.models import ImageLimits
from tests.image_bodies import data_url, image_bytes

LIMITS = ImageLimits(max_images=2, max_bytes=20_000, max_pixels=5_000)


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    limit_media()
    token = current_reads.set(ImageReads(LIMITS))
    yield
    current_reads.reset(token)


def connector() -> Any:
    """The reader that vLLM's application uses."""
    return MEDIA_CONNECTOR_REGISTRY.load("http")


async def refusal(url: str) -> VLLMValidationError:
    with pytest.raises(VLLMValidationError) as sync:
        connector().fetch_image(url)
    current_reads.get().number -= 1
    with pytest.raises(VLLMValidationError) as refused:
        await connector().fetch_image_async(url)
    assert str(refused.value) == str(sync.value)
    assert refused.value.parameter == "image_url"
    return refused.value


async def test_data_url_within_the_limits_is_read() -> None:
    image = await connector().fetch_image_async(data_url(1))

    assert image.media.size == (48, 32)
    assert connector().fetch_image(data_url(1)).media == image.media


async def test_too_many_pixels_are_refused_by_the_header_alone() -> None:
    file = io.BytesIO()
    Image.new("1", (8000, 8000)).save(file, "PNG")
    # Only the header is present: a decoder would fail.
    cut = base64.b64encode(file.getvalue()[:64]).decode()

    assert "limit is 5000 pixels" in str(await refusal(f"data:image/png;base64,{cut}"))


async def test_pixels_above_the_limit_are_refused() -> None:
    url = data_url(1, width=100, height=51)

    assert "limit is 5000 pixels" in str(await refusal(url))


async def test_bytes_above_the_limit_are_refused() -> None:
    data = base64.b64encode(bytes(LIMITS.max_bytes + 2)).decode()

    assert "limit is 20000 bytes" in str(await refusal(f"data:image/png;base64,{data}"))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,AAAA", "cannot be read"),
        ("data:image/png;base64,A", "image_url"),
        ("data:image/png,AAAA", "base64"),
        ("file:///etc/passwd", "'file'"),
        ("http://127.0.0.1:9/a.png", "'127.0.0.1'"),
    ],
)
async def test_other_urls_are_refused(url: str, reason: str) -> None:
    assert reason in str(await refusal(url))


async def test_number_of_images_is_limited_over_all_messages_of_a_call() -> None:
    await connector().fetch_image_async(data_url(1))
    await connector().fetch_image_async(data_url(1))
    with pytest.raises(VLLMValidationError, match="limit is 2"):
        await connector().fetch_image_async(data_url(1))


async def test_audio_and_video_are_refused_by_name() -> None:
    for name in ("audio", "video"):
        with pytest.raises(VLLMValidationError, match=name):
            await getattr(connector(), f"fetch_{name}_async")(f"data:{name}/x;base64,AAAA")
        with pytest.raises(VLLMValidationError, match=name):
            getattr(connector(), f"fetch_{name}")(f"data:{name}/x;base64,AAAA")


@pytest.fixture
def server() -> Iterator[str]:
    """URL of a server with an image, a large file and a redirect to the image."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("location", "/image")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(image_bytes(1) if self.path == "/image" else bytes(30_000))

        def log_message(self, *_: Any) -> None: ...

    serving = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    thread.join()
    serving.server_close()


async def test_allowed_host_is_read_within_the_limits_and_without_redirects(server: str) -> None:
    reads = ImageReads(ImageLimits(max_images=9, max_bytes=20_000), {"127.0.0.1"})
    current_reads.set(reads)
    image = await connector().fetch_image_async(f"{server}/image")

    assert image.media.size == (48, 32)
    assert (await asyncio.to_thread(connector().fetch_image, f"{server}/image")).media.size
    with pytest.raises(VLLMValidationError, match="limit is 20000 bytes"):
        await connector().fetch_image_async(f"{server}/large")
    with pytest.raises(VLLMValidationError, match="cannot be read"):
        await connector().fetch_image_async(f"{server}/moved")


def feature(seed: float = 1.0, *, offset: int = 1, length: int = 4, **fields: Any) -> Any:
    """An image as vLLM encodes it, with the place of its embeddings."""
    element = MultiModalFieldElem(
        data=torch.full((3, 40, 40), seed), field=MultiModalBatchedField()
    )
    defaults: dict[str, Any] = {
        "data": MultiModalKwargsItem({"pixel_values": element}),
        "modality": "image",
        "identifier": "chosen by the client",
        "mm_position": PlaceholderRange(offset=offset, length=length),
        "mm_hash": "chosen by the client",
    }
    return MultiModalFeatureSpec(**(defaults | fields))


def checked(*features: Any, prompt_tokens: int = 10, max_images: int = 2) -> Any:
    return checked_images(
        list(features), prompt_tokens=prompt_tokens, max_images=max_images, max_embeds=5
    )


def test_images_survive_the_encoding() -> None:
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[1] * 10,
        mm_features=[feature(1.0), feature(1.0, offset=5)],
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    found = decode_request(encode_request(request)).mm_features

    assert found == request.mm_features


def test_identifier_depends_on_the_content_alone() -> None:
    one, same, other = (
        checked(feature(seed, offset=offset))[0].identifier
        for seed, offset in ((1.0, 1), (1.0, 2), (2.0, 1))
    )

    assert one == same != other
    assert "client" not in one


def test_request_without_images_has_none() -> None:
    assert checked_images(None, prompt_tokens=1, max_images=0, max_embeds=0) is None
    assert checked() is None


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ([feature()] * 3, "limit is 2"),
        ([feature(modality="audio")], "'audio'"),
        ([feature(data=None)], "no data"),
        ([feature(offset=8)], "ends at token 12"),
        ([feature(offset=-1)], "no place"),
        ([feature(length=0)], "no place"),
        ([feature(length=6)], "6 embeddings"),
        ([feature(), feature(offset=4)], "overlaps"),
        (
            [
                feature(
                    mm_position=PlaceholderRange(
                        offset=0, length=4, is_embed=torch.zeros(4, dtype=torch.bool)
                    )
                )
            ],
            "0 embeddings",
        ),
        (
            [
                feature(
                    mm_position=PlaceholderRange(
                        offset=0, length=4, is_embed=torch.ones(3, dtype=torch.bool)
                    )
                )
            ],
            "length",
        ),
    ],
)
def test_invalid_images_are_refused(features: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        checked(*features)


def test_model_without_images_refuses_them() -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        checked(feature(), max_images=0)
