"""
Submits requests through the wheel `headway-client`, and prints one JSON line per answer.

`ops.bench.storm` starts this program twice, with an interpreter that has the wheel and nothing else
of this repository. It reads requests as JSON lines: `number`, `at_s` (seconds from the start) and
`fields`.
"""

import asyncio
import json
import logging
import sys
from typing import Any

from headway_client import Client, MeshError, connect


async def ask(client: Client, job: dict[str, Any], limit_s: float) -> None:
    await asyncio.sleep(job["at_s"])
    answer: dict[str, Any] = {"number": job["number"], "streamed": [], "streamed_text": ""}
    try:
        async with asyncio.timeout(limit_s):
            submitted = await client.submit(**job["fields"])
            async for part in submitted.stream():
                answer["streamed"] += part.token_ids
                answer["streamed_text"] += part.text
            final = await submitted.wait()
        answer |= {"tokens": final.token_ids, "text": final.text}
    except (MeshError, TimeoutError) as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)


async def main(url: str, limit_s: float, name: str) -> None:
    jobs = [json.loads(line) for line in sys.stdin]
    async with connect(url, name=f"storm-{name}", give_up_after_s=limit_s) as client:
        await asyncio.gather(*(ask(client, job, limit_s) for job in jobs))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # the broker is lost on purpose
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
