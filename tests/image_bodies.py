"""Images and bodies with images."""

import base64
import io
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
Body = dict[str, Any]


def image_bytes(
    seed: int, *, width: int = 48, height: int = 32, kind: str = "PNG", plain: bool = False
) -> bytes:
    """The file of an image of random pixels, or of one color if it is *plain*."""
    from PIL import Image  # noqa: PLC0415 - installed with the engine

    file = io.BytesIO()
    if plain:
        Image.new("RGB", (width, height)).save(file, kind)
    else:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def data_url(seed: int, **shape: Any) -> str:
    """A data URL of the image of `image_bytes`."""
    kind = shape.get("kind", "PNG").lower()
    return f"data:image/{kind};base64,{base64.b64encode(image_bytes(seed, **shape)).decode()}"


def chat_body(parts: list[Any], **fields: Any) -> Body:
    """A chat of one message; texts and URLs of images are *parts*, in tuples for images."""
    messages = _user_message(
        parts, "text", lambda url: {"type": "image_url", "image_url": {"url": url}}
    )
    return {"messages": messages, "max_tokens": 12, "temperature": 0} | fields


def responses_body(parts: list[Any], **fields: Any) -> Body:
    """As `chat_body`, for the endpoint of Responses."""
    messages = _user_message(
        parts,
        "input_text",
        lambda url: {"type": "input_image", "image_url": url, "detail": "auto"},
    )
    return {"input": messages, "max_output_tokens": 12, "temperature": 0} | fields


def messages_body(parts: list[Any], **fields: Any) -> Body:
    """As `chat_body`, for the endpoint of Messages."""
    messages = _user_message(parts, "text", lambda url: {"type": "image", "source": _source(url)})
    return {"messages": messages, "max_tokens": 12, "temperature": 0} | fields


def _user_message(
    parts: list[Any], text_type: str, image_part: Callable[[str], Body]
) -> list[Body]:
    content = [
        image_part(part[0]) if isinstance(part, tuple) else {"type": text_type, "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def _source(url: str) -> Body:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url.partition(",")
    media_type = head.removeprefix("data:").partition(";")[0]
    return {"type": "base64", "media_type": media_type, "data": data}


MAKERS = {CHAT: chat_body, RESPONSES: responses_body, MESSAGES: messages_body}


def seeded_bodies(seed: int, number: int) -> list[tuple[str, Body]]:
    """Endpoints and bodies, each with one to three images of several sizes and kinds."""
    random = Random(seed)
    made = []
    for index in range(number):
        endpoint = (CHAT, RESPONSES, MESSAGES)[index % 3]
        images = [
            (
                data_url(
                    random.randrange(4),
                    width=random.choice((8, 32, 48, 100)),
                    height=random.choice((16, 40, 64)),
                    kind=random.choice(("PNG", "JPEG", "WEBP")),
                ),
            )
            for _ in range(random.randint(1, 3))
        ]
        parts = [f"picture {random.randrange(100)}", *images, "and then?"]
        random.shuffle(parts)
        made.append((endpoint, MAKERS[endpoint](parts)))
    return made
