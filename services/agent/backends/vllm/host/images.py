"""Checks of the images of a request. Runs in the engine host."""

from typing import Any

from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec

IMAGE = "image"


def checked_images(
    features: list[MultiModalFeatureSpec] | None,
    *,
    prompt_tokens: int,
    max_images: int,
    max_embeds: int,
) -> list[MultiModalFeatureSpec] | None:
    """
    The images of a request with the identifiers under which the engine caches what it computes of
    them. The identifiers are hashes of the images: a client may choose those that vLLM's
    application sends, and could read the cache of another image.

    Args:
        features: Images that vLLM's application has processed, in the order of the prompt.
        prompt_tokens: Length of the prompt, without the progress.
        max_images: Maximum number of images; 0 if the model reads none.
        max_embeds: Maximum number of tokens whose embeddings come from one image.

    Raises:
        ValueError: An image is incomplete, is not within the prompt, or exceeds a limit; or an
            input is not an image.
    """
    if not features:
        return None
    if len(features) > max_images:
        raise ValueError(f"the request has {len(features)} images; the limit is {max_images}")
    end = 0
    for each in features:
        if each.modality != IMAGE:
            raise ValueError(f"inputs of the modality {each.modality!r} are not supported")
        if not each.data or any(element.data is None for element in each.data.values()):
            raise ValueError("an image has no data")
        end = _end_of(each.mm_position, end, max_embeds)
    if end > prompt_tokens:
        raise ValueError(f"an image ends at token {end} of a prompt of {prompt_tokens} tokens")
    return [_identified(each) for each in features]


def _end_of(position: Any, earliest: int, max_embeds: int) -> int:
    """The token after an image, which begins at the token *earliest* or later."""
    if position.length < 1 or position.offset < earliest:
        raise ValueError("an image has no place in the prompt, or overlaps another image")
    mask = position.is_embed
    if mask is not None and tuple(mask.shape) != (position.length,):
        raise ValueError("the places of an image's embeddings do not have its length")
    if not 0 < position.get_num_embeds() <= max_embeds:
        raise ValueError(
            f"an image has {position.get_num_embeds()} embeddings; the engine has room for "
            f"{max_embeds}"
        )
    return int(position.offset + position.length)


def _identified(feature: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
    contents = {name: element.data for name, element in feature.data.items()}
    identifier = MultiModalHasher.hash_kwargs("sha256", **contents)
    return MultiModalFeatureSpec(
        data=feature.data,
        modality=IMAGE,
        identifier=identifier,
        mm_position=feature.mm_position,
        mm_hash=identifier,
    )
