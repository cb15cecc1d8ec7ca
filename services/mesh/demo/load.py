"""The demo's load: clients of all classes side by side, until a time."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import aiohttp

from services.mesh.demo.classes import CLASSES, QUESTIONS, Asked, DemoClass, PromptForm
from services.mesh.demo.http import Gateway, NotServedError
from shared.client.client import Client
from shared.client.errors import RequestError
from shared.contracts.base import Seconds
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.http.failures import failure_reason

PATIENCE_S: Seconds = 45.0
"""Time after the load within which the answers must be whole."""
_FAILED_PAUSE_S = 0.5
"""Pause of a client after an error."""


async def usable_models(
    gateway: Gateway, names: Sequence[str], *, within_s: Seconds, say: Callable[[str], None]
) -> dict[str, PromptForm]:
    """
    Ask each model once.

    Returns:
        Name -> form of its prompts; models that generate no text are missing.

    Raises:
        SettingsError: No model answers in time.
    """
    found: dict[str, PromptForm] = {}
    reason = "no answer"
    for name in names:
        began = time.monotonic()
        for form in PromptForm:
            try:
                async with asyncio.timeout(within_s):
                    first = await gateway.ask(CLASSES[0], name, QUESTIONS[0], form)
            except (NotServedError, aiohttp.ClientError, TimeoutError) as error:
                reason = f"{name}: {failure_reason(error)}"
                continue
            found[name] = form
            say(f"{name} answers: first token after {first.first_s or 0:.2f} s")
            break
        else:
            say(f"{name} is left out after {time.monotonic() - began:.0f} s: {reason}")
    if not found:
        raise SettingsError(f"no model answers; the last reason: {reason}")
    return found


async def run_load(
    gateway: Gateway, client: Client, models: dict[str, PromptForm], *, duration_s: Seconds
) -> list[Asked]:
    """
    Let all clients ask for *duration_s* seconds, and wait at most `PATIENCE_S` for the last
    answers.
    """
    until = time.monotonic() + duration_s
    prompts = itertools.cycle(QUESTIONS)
    names = itertools.cycle(models)
    asked: list[Asked] = []

    async def one_client(demo_class: DemoClass) -> None:
        while time.monotonic() < until:
            model, prompt = next(names), next(prompts)
            try:
                async with asyncio.timeout_at(
                    asyncio.get_running_loop().time() + until - time.monotonic() + PATIENCE_S
                ):
                    if demo_class.door == "HTTP":
                        done = await gateway.ask(demo_class, model, prompt, models[model])
                    else:
                        done = await _over_amqp(client, demo_class, model, prompt, models[model])
            except (MeshError, RequestError, aiohttp.ClientError, TimeoutError) as error:
                text = failure_reason(error)
                done = Asked(name=demo_class.name, model=model, prompt=prompt, error=text)
                await asyncio.sleep(_FAILED_PAUSE_S)
            asked.append(done)

    async with asyncio.TaskGroup() as tasks:
        for each in CLASSES:
            for _ in range(each.clients):
                tasks.create_task(one_client(each), name=f"client {each.name}")
    return asked


async def _over_amqp(
    client: Client, demo_class: DemoClass, model: str, prompt: str, form: PromptForm
) -> Asked:
    """Submit one request, and read its answer as it comes."""
    began = time.monotonic()
    first_s: Seconds | None = None
    answer = await client.submit(
        model=model,
        max_tokens=demo_class.max_tokens,
        slo=demo_class.slo,
        application=f"demo-{demo_class.name}",
        **form.fields(prompt),
    )
    async for part in answer.stream():
        if first_s is None and (part.text or part.token_ids):
            first_s = time.monotonic() - began
    final = await answer.wait()
    return Asked(
        name=demo_class.name,
        model=model,
        prompt=prompt,
        text=final.text,
        first_s=first_s,
        whole_s=time.monotonic() - began,
    )
