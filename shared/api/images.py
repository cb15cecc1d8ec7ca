"""Limits of images in requests, and rules for their URLs."""

from collections.abc import Collection
from urllib.parse import urlsplit

from shared.contracts.errors import ContractError
from shared.contracts.models import ImageLimits

FIELD = "image_url"
"""Name of the field in errors; Anthropic's field `source` becomes this field."""
CODE = "unsupported_image"
_SHOWN_CHARS = 80


def check_number(number: int, limits: ImageLimits) -> None:
    """
    Check the number of images of a request.

    Raises:
        ContractError: There are too many images.
    """
    if number > limits.max_images:
        raise _refusal(f"the request has too many images: the limit is {limits.max_images}")


def check_num_bytes(num_bytes: int, limits: ImageLimits) -> None:
    """
    Check the size of the file of an image.

    Raises:
        ContractError: The file is too large.
    """
    if num_bytes > limits.max_bytes:
        raise _refusal(
            f"an image has {num_bytes} bytes: the limit is {limits.max_bytes} bytes for each image"
        )


def check_pixels(width: int, height: int, limits: ImageLimits) -> None:
    """
    Check the width and height of an image, in pixels.

    Raises:
        ContractError: The image has too many pixels.
    """
    if width * height > limits.max_pixels:
        raise _refusal(
            f"an image has {width} x {height} pixels: the limit is {limits.max_pixels} pixels "
            "for each image"
        )


def check_url(url: str, hosts: Collection[str]) -> None:
    """
    Check that an image may be read from its URL: a data URL, or an http or https URL whose host is
    one of *hosts*.

    Raises:
        ContractError: The URL has another scheme or host.
    """
    if url[:5].lower() == "data:":
        return
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
    except ValueError:
        raise _refusal("the URL of an image is invalid") from None
    # Parsers of URLs disagree about these characters, and a client could name two hosts.
    if "@" in parts.netloc or "\\" in url or any(each <= " " for each in url):
        raise _refusal("the URL of an image has a user name, a backslash or a space")
    if parts.scheme not in ("http", "https"):
        raise _refusal(
            f"URLs of images with the scheme {parts.scheme[:_SHOWN_CHARS]!r} are not supported: "
            "only data URLs, and http and https URLs of allowed hosts"
        )
    if host not in hosts:
        raise _refusal(
            f"images are not read from the host {host[:_SHOWN_CHARS]!r}: send a data URL, or add "
            "the host to allowed_media_hosts of the model"
        )


def _refusal(message: str) -> ContractError:
    return ContractError(f"{FIELD}: {message}", code=CODE, param=FIELD)
