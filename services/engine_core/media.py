"""Reading of images by vLLM's application, with the mesh's limits."""

import asyncio
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from io import BytesIO
from typing import Any, NoReturn

from PIL import Image
from urllib3.util import parse_url
from vllm import envs
from vllm.connections import HTTPResponseSizeExceededError, MediaDownloadSizeExceededError
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media.connector import (
    MEDIA_CONNECTOR_REGISTRY,
    MediaConnector,
    _wrap_media_fetch_error,
)
from vllm.multimodal.media.image import ImageMediaIO

from shared.api.images import (
    FIELD,
    check_num_bytes,
    check_number,
    check_pixels,
    check_url,
)
from shared.contracts.errors import ContractError
from shared.contracts.models import ImageLimits

_CONNECTOR = "http"
"""Name of vLLM's reader of media, unless `VLLM_MEDIA_CONNECTOR` names another one."""


@dataclass(slots=True)
class ImageReads:
    """Images that one call reads."""

    limits: ImageLimits = field(default_factory=ImageLimits)
    hosts: Collection[str] = ()
    """Hosts of which http and https URLs are read."""
    number: int = 0
    """Number of images so far."""

    def begin(self, url: str) -> None:
        """
        Count one more image.

        Raises:
            ContractError: There are too many images, or the URL is not read.
        """
        self.number += 1
        check_number(self.number, self.limits)
        check_url(url, self.hosts)


current_reads: ContextVar[ImageReads] = ContextVar("image reads")
"""The images of the call in whose context vLLM's application runs."""


class LimitedImageIO(ImageMediaIO):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Decodes the files of images that are within the limits."""

    def __init__(self, limits: ImageLimits, image_mode: str | None) -> None:
        super().__init__(image_mode=image_mode)
        self._limits = limits

    def get_max_bytes(self) -> int:
        return self._limits.max_bytes

    def load_base64(self, media_type: str, data: str) -> Any:
        """
        Decode base64.

        Raises:
            VLLMValidationError: The data is invalid, or the image exceeds a limit.
        """
        # Base64 has four characters for three bytes, some of which may be padding.
        self._refused_above(check_num_bytes, len(data) * 3 // 4 - 2)
        try:
            return super().load_base64(media_type, data)
        except VLLMValidationError:
            raise
        except ValueError as error:
            raise VLLMValidationError(f"{FIELD}: {error}", parameter=FIELD) from error

    def load_bytes(self, data: bytes) -> Any:
        """
        Decode the file of an image, whose header states its size.

        Raises:
            VLLMValidationError: The file is not an image, or the image exceeds a limit.
        """
        self._refused_above(check_num_bytes, len(data))
        try:
            with open_image(BytesIO(data)) as image:
                width, height = image.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise VLLMValidationError(
                f"{FIELD}: the image cannot be read: its header is invalid, or its format is not "
                "supported",
                parameter=FIELD,
            ) from error
        self._refused_above(check_pixels, width, height)
        try:
            return super().load_bytes(data)
        except ValueError as error:
            raise VLLMValidationError(f"{FIELD}: {error}", parameter=FIELD) from error

    def _refused_above(self, check: Any, *sizes: int) -> None:
        try:
            check(*sizes, self._limits)
        except ContractError as error:
            raise _invalid(error) from error


class LimitedMediaConnector(MediaConnector):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Reads images within the limits of the current call; refuses audio, video and files."""

    def fetch_image(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        """
        Read an image.

        Raises:
            VLLMValidationError: The URL is not read, or the image exceeds a limit.
        """
        reader = _begun(image_url, image_mode)
        if image_url[:5].lower() == "data:":
            return self._decoded(image_url, reader)
        try:
            data = self.connection.get_bytes(
                parse_url(image_url).url,
                timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT,
                allow_redirects=False,
                max_bytes=reader.get_max_bytes(),
            )
        except Exception as error:  # its HTTP clients raise many kinds of errors
            raise _fetch_error(image_url, error, reader.get_max_bytes()) from error
        return reader.load_bytes(data)

    async def fetch_image_async(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        """
        Read an image; decode it in another thread.

        Raises:
            VLLMValidationError: The URL is not read, or the image exceeds a limit.
        """
        reader = _begun(image_url, image_mode)
        if image_url[:5].lower() == "data:":
            return await asyncio.to_thread(self._decoded, image_url, reader)
        try:
            # A redirect could lead to a host that is not allowed.
            data = await self.connection.async_get_bytes(
                parse_url(image_url).url,
                timeout=envs.VLLM_IMAGE_FETCH_TIMEOUT,
                allow_redirects=False,
                max_bytes=reader.get_max_bytes(),
            )
        except Exception as error:  # its HTTP clients raise many kinds of errors
            raise _fetch_error(image_url, error, reader.get_max_bytes()) from error
        return await asyncio.to_thread(reader.load_bytes, data)

    def fetch_audio(self, audio_url: str) -> NoReturn:  # noqa: ARG002 - vLLM's signature
        raise _unsupported("audio")

    async def fetch_audio_async(self, audio_url: str) -> NoReturn:  # noqa: ARG002
        raise _unsupported("audio")

    def fetch_video(self, video_url: str, **_: Any) -> NoReturn:  # noqa: ARG002
        raise _unsupported("video")

    async def fetch_video_async(self, video_url: str, **_: Any) -> NoReturn:  # noqa: ARG002
        raise _unsupported("video")

    def _decoded(self, url: str, reader: LimitedImageIO) -> Any:
        try:
            return self._load_data_url(url, reader)
        except NotImplementedError as error:
            raise VLLMValidationError(f"{FIELD}: {error}", parameter=FIELD) from error


def limit_media() -> None:
    """Replace vLLM's reader of media, in every application of this process."""
    MEDIA_CONNECTOR_REGISTRY.register(_CONNECTOR)(LimitedMediaConnector)


def _begun(url: str, image_mode: str | None) -> LimitedImageIO:
    """
    The reader of one more image of the current call.

    Raises:
        VLLMValidationError: There are too many images, or the URL is not read.
    """
    reads = current_reads.get(None) or ImageReads()
    try:
        reads.begin(url)
    except ContractError as error:
        raise _invalid(error) from error
    return LimitedImageIO(reads.limits, image_mode)


def _fetch_error(url: str, error: Exception, max_bytes: int) -> Any:
    """The error of a request whose image could not be fetched."""
    if isinstance(error, HTTPResponseSizeExceededError | MediaDownloadSizeExceededError):
        return VLLMValidationError(
            f"{FIELD}: an image is too large: the limit is {max_bytes} bytes for each image",
            parameter=FIELD,
        )
    wrapped = _wrap_media_fetch_error(url, error)
    if wrapped is error:
        return GracefulHTTPError(f"{FIELD}: its host did not answer", HTTPStatus.BAD_GATEWAY)
    return wrapped


def _invalid(error: ContractError) -> VLLMValidationError:
    return VLLMValidationError(str(error), parameter=FIELD)


def _unsupported(modality: str) -> VLLMValidationError:
    return VLLMValidationError(f"{modality} is not supported", parameter=f"{modality}_url")
