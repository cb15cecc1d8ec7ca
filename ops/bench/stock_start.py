"""Start stock vLLM for a model and send a request: the baseline of swapping models by Headway."""

import argparse
import asyncio
import json
import time

from vllm import AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM


async def first_answer(engine_args: dict[str, object], prompt_tokens: int) -> float:
    """Start an engine, send a request, and return the Unix time of the first token."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))
    prompt = TokensPrompt(prompt_token_ids=list(range(10, 10 + prompt_tokens)))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    async for output in engine.generate(prompt, sampling, "first"):
        if output.outputs[0].token_ids:
            break
    at = time.time()
    engine.shutdown()
    return at


def main() -> None:
    """Print the Unix time of the first token."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.stock_start", description=__doc__)
    parser.add_argument("engine_args", type=json.loads, help="engine arguments as JSON")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    options = parser.parse_args()
    print(asyncio.run(first_answer(options.engine_args, options.prompt_tokens)), flush=True)


if __name__ == "__main__":
    main()
