"""Streamed answers as producers receive them."""

from shared.contracts.requests import Reply, TokensEmitted
from tests.queued import MODEL
from tests.unit.agent.rig import AgentRig


def streamed_tokens(replies: list[Reply]) -> tuple[int, ...]:
    """All tokens of an answer's messages, in order of arrival."""
    return tuple(
        token
        for reply in replies
        if isinstance(reply, TokensEmitted)
        for chunk in reply.chunks
        for token in chunk.token_ids
    )


def streamed_text(replies: list[Reply]) -> str:
    return "".join(
        chunk.text
        for reply in replies
        if isinstance(reply, TokensEmitted)
        for chunk in reply.chunks
    )


def tokens_of(rig: AgentRig, text: str) -> tuple[int, ...]:
    """Tokens of *text*, without tokens that the tokenizer adds around a prompt."""
    tokens = rig.tokenizers[MODEL].encode(text)
    return tuple(token for token in tokens if token >= 8)
