"""OpenAI's agents SDK: a loop that ends after the second tool call. Prints one JSON object."""

import asyncio
import json
import os
import sys
from typing import Literal

import agents
from openai import AsyncOpenAI

results: list[str] = []


@agents.function_tool
def pick(count: Literal[1, 2, 3]) -> str:
    """Pick items."""
    results.append(f"picked {count}, call {len(results) + 1}")
    return results[-1]


def ends(_context: object, _results: object) -> agents.ToolsToFinalOutputResult:
    return agents.ToolsToFinalOutputResult(
        is_final_output=len(results) >= 2, final_output=results[-1]
    )


async def main() -> None:
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="unused", max_retries=0)
    agent = agents.Agent(
        name="picker",
        instructions="Pick items.",
        tools=[pick],
        tool_use_behavior=ends,
        reset_tool_choice=False,
        model=agents.OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=client),
        model_settings=agents.ModelSettings(tool_choice="required", temperature=0, max_tokens=400),
    )
    ran = await agents.Runner.run(agent, "Pick some items.")
    found = {"final": ran.final_output, "results": results, "transcript": ran.to_input_list()}
    json.dump(found, sys.stdout)


asyncio.run(main())
