"""Streamed answers as producers receive them."""

from shared.contracts.requests import Reply, TokenChunk, TokensEmitted
from tests.agents.rig import AgentRig
from tests.queued import MODEL


def chunks_of(replies: list[Reply]) -> list[TokenChunk]:
    """All chunks of an answer's messages, in order of arrival."""
    return [chunk for each in replies if isinstance(each, TokensEmitted) for chunk in each.chunks]


def streamed_tokens(replies: list[Reply]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks_of(replies) for token in chunk.token_ids)


def streamed_text(replies: list[Reply]) -> str:
    return "".join(chunk.text for chunk in chunks_of(replies))


def tokens_of(rig: AgentRig, text: str) -> tuple[int, ...]:
    """Tokens of *text*, without tokens that the tokenizer adds around a prompt."""
    tokens = rig.models.tokenizers[MODEL].encode(text)
    return tuple(token for token in tokens if token >= 8)
