"""A grammar that takes too long to compile fails its own request."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.errors import EngineError
from shared.models.tiny_tokenizer import train_tokenizer
from tests.contract.engine.engines import prompt_of
from tests.contract.structured.structured_engines import PLAIN, structured_rig

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PROMPT = prompt_of(40)
LIMIT_S = 0.5
DEPTH = 13
"""Depth of a schema that takes several times `LIMIT_S` to compile."""
CODE = "[a-f]{3,9}-[0-9]{2}"


def deep_schema(depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    below = deep_schema(depth - 1)
    return {"type": "object", "properties": {"left": below, "right": below}}


async def test_other_grammars_are_compiled_meanwhile(tmp_path: Path):
    tokenizer = train_tokenizer()
    async with structured_rig(tmp_path, grammar_timeout_s=LIMIT_S) as rig:
        await rig.engine.activate(PLAIN)
        slow = asyncio.create_task(
            rig.constrained(PLAIN, PROMPT, structured_outputs={"json": deep_schema(DEPTH)})
        )

        async def is_answered() -> None:
            answer = await rig.constrained(PLAIN, PROMPT, structured_outputs={"regex": CODE})
            text = tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
            assert re.fullmatch(CODE, text)

        await is_answered()
        with pytest.raises(EngineError, match=r"longer than 0\.5 s to compile") as refused:
            await slow
        assert not refused.value.engine_dead
        await is_answered()
