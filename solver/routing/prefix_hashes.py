"""Hashes of a prompt's first parts, which identify requests with equal beginnings."""

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from shared.contracts.requests import ChatMessage, Tokens

PART_BYTES = 512
"""Bytes of text: about a hundred tokens, a few blocks of an engine's prefix cache."""
PART_TOKENS = 128
MOST_PARTS = 128
"""About 16,000 tokens; a longer common beginning of two prompts is not distinguished."""
_TOKEN_BYTES = 4
_HASH_BYTES = 6
"""Bytes of a hash: exact in every JSON reader, and equal by chance once in 10^14 pairs."""


def prefix_hashes(
    prompt: str | Tokens | None, messages: Iterable[ChatMessage] | None
) -> tuple[int, ...]:
    """
    A hash for each full part of the prompt; each covers all text up to its end.

    The messages of a chat are hashed one after another, because a next turn only appends; the
    template that the engine adds around them is the same for all. A prompt with ids that no
    vocabulary has matches no other.
    """
    hashes, before = [], b""
    for part in _parts(prompt, messages):
        before = blake2b(before + part, digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(before, "little"))
    return tuple(hashes)


def part_tokens(num_parts: int, prompt_tokens: int) -> float:
    """Approximate tokens per part of a prompt with *num_parts* hashes."""
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
