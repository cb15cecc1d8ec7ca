"""Hashes of the first parts of a prompt; requests with equal beginnings have equal hashes."""

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from shared.contracts.requests import ChatMessage, Tokens

PART_BYTES = 512
"""
Bytes of prompt text per part: about a hundred tokens, or a few blocks of an engine's prefix cache.
"""
PART_TOKENS = 128
MOST_PARTS = 128
"""
Maximum number of hashed parts of a prompt: about 16,000 tokens. Later differences of prompts are
ignored.
"""
_TOKEN_BYTES = 4
_HASH_BYTES = 6
"""
Number of bytes of a hash: exact as a JSON number; two hashes are equal by chance once in 10^14
pairs.
"""


def prefix_hashes(
    prompt: str | Tokens | None, messages: Iterable[ChatMessage] | None
) -> tuple[int, ...]:
    """
    Hashes of the full parts of a prompt; each hash covers the prompt up to the end of its part.

    The messages of a chat are hashed in order, because a later turn only appends messages. The chat
    template is not hashed, because it is the same for all requests of a model. A prompt with
    invalid token ids has no hashes.
    """
    hashes, before = [], b""
    for part in _parts(prompt, messages):
        before = blake2b(before + part, digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(before, "little"))
    return tuple(hashes)


def part_tokens(num_parts: int, prompt_tokens: int) -> float:
    """Approximate number of tokens per part of a prompt with *num_parts* hashes."""
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
