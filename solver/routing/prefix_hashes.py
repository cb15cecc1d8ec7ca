"""Names of a prompt's first parts, by which requests with equal beginnings are recognised."""

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from shared.contracts.requests import ChatMessage, Tokens

PART_BYTES = 512
"""Of text: about a hundred tokens, a few blocks of an engine's prefix cache."""
PART_TOKENS = 128
MOST_PARTS = 128
"""16,000 tokens or so; what two longer prompts have in common beyond that is not told apart."""
_TOKEN_BYTES = 4
_HASH_BYTES = 6
"""Numbers that every JSON reader holds exactly; equal by chance once in 10^14 pairs."""


def prefix_hashes(
    prompt: str | Tokens | None, messages: Iterable[ChatMessage] | None
) -> tuple[int, ...]:
    """
    A hash for each full part of the prompt; each stands for all text up to its end.

    Chats hash as their messages do, one after the other, since a next turn only appends; the
    template that the engine writes around them is the same for all. A prompt with ids that no
    vocabulary has begins like no other.
    """
    hashes, before = [], b""
    for part in _parts(prompt, messages):
        before = blake2b(before + part, digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(before, "little"))
    return tuple(hashes)


def part_tokens(num_parts: int, prompt_tokens: int) -> float:
    """About so many tokens of a prompt with *num_parts* hashes are in each part."""
    if num_parts >= MOST_PARTS:
        return PART_TOKENS
    return prompt_tokens / (num_parts + 0.5)


def _parts(prompt: str | Tokens | None, messages: Iterable[ChatMessage] | None) -> Iterator[bytes]:
    if isinstance(prompt, tuple):
        data, size = _packed(prompt[: MOST_PARTS * PART_TOKENS]), PART_TOKENS * _TOKEN_BYTES
    else:
        data, size = (prompt or _text_of(messages or ())).encode(), PART_BYTES
    for number in range(min(MOST_PARTS, len(data) // size)):
        yield data[number * size : (number + 1) * size]


def _packed(token_ids: Tokens) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        return b""


def _text_of(messages: Iterable[ChatMessage]) -> str:
    return "".join(f"{each.role}\0{_content_of(each)}\0" for each in messages)


def _content_of(message: ChatMessage) -> str:
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content)
    return message.content or ""
