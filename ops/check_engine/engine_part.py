"""Starts the engine as an agent does, and measures it with a few requests."""

import asyncio
import statistics
import time
from itertools import count

import msgspec

from ops.bench.given_model import given_model
from ops.check_engine.part import Found, Options, PartFailedError
from ops.engine_runs import generate
from services.agent.backends.base import EngineRequest
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Sampling, Tokens
from shared.contracts.telemetry import Capability
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models

MODEL = ModelName("tiny-llama")
GIVEN = ModelName("model")
_PROMPT_TOKENS, _ANSWER_TOKENS, _ROUNDS = 512, 64, 5
_MANY = 16
_ids = count()


def entry_of(options: Options) -> ModelEntry:
    """
    The model of the measurements.

    Raises:
        SettingsError: The folder of the user has no model.
    """
    if options.model is not None:
        return given_model(options.model, GIVEN)
    models = make_tiny_models(options.out / "models", models={MODEL: TINY_MODELS[MODEL]})
    return ModelRegistry.load(models).entry(MODEL)


def engine(options: Options) -> Found:
    """
    Start the engine with the defaults of its device, and measure first tokens and throughput.

    If the engine fails, the result has the figures up to the failure.

    Raises:
        PartFailedError: vLLM is not installed.
    """
    reason = vllm_unavailable_reason()
    if reason is not None:
        raise PartFailedError(reason)
    found, log = Found(), options.out / "engine.log"
    settings = VllmSettings(prefix_caching=False, log_path=str(log))
    try:
        asyncio.run(_measured(entry_of(options), settings, found))
    except Exception as error:  # noqa: BLE001 - report the figures so far with the failure
        found.failure = f"{error or type(error).__name__}; see {log}"
    return found


async def _measured(entry: ModelEntry, settings: VllmSettings, found: Found) -> None:
    backend = VllmEngine([entry], settings)
    try:
        began = time.monotonic()
        await backend.start()
        found.figures["start of the engine host, s"] = _since(began)
        began = time.monotonic()
        await backend.activate(entry.name)
        found.figures["load of the model, s"] = _since(began)
        _describe(backend, entry, found)
        await _time(backend, entry, found)
        compiles = backend.choices is not None and not backend.choices.eager
    finally:
        await backend.close()
    if compiles:
        found.figures["second load of the model, s"] = await _loaded_again(entry, settings)


async def _loaded_again(entry: ModelEntry, settings: VllmSettings) -> Seconds:
    """Time to load the model in a new host."""
    backend = VllmEngine([entry], settings)
    try:
        await backend.start()
        began = time.monotonic()
        await backend.activate(entry.name)
        return _since(began)
    finally:
        await backend.close()


def _describe(backend: VllmEngine, entry: ModelEntry, found: Found) -> None:
    identity, choices = backend.identity, backend.choices
    found.figures["device of the instance"] = identity.device
    found.figures["engine"] = identity.engine
    found.figures["model"] = f"{entry.architecture}, {entry.path}"
    found.figures["missing capabilities"] = (
        sorted(each.value for each in set(Capability) - identity.capabilities) or "none"
    )
    if choices is not None:
        found.figures |= {
            f"setting: {name}": value for name, value in msgspec.structs.asdict(choices).items()
        }
    found.figures["KV capacity, tokens"] = backend.snapshot().kv_capacity_tokens


async def _time(backend: VllmEngine, entry: ModelEntry, found: Found) -> None:
    found.figures["very first answer, s"] = (await _answer(backend, entry, 0))[1]
    alone = [await _answer(backend, entry, 1 + number) for number in range(_ROUNDS)]
    found.figures["first token alone, ms"] = 1000 * statistics.median(first for first, _ in alone)
    found.figures["gap between tokens alone, ms"] = 1000 * statistics.median(
        (whole - first) / (_ANSWER_TOKENS - 1) for first, whole in alone
    )
    began = time.monotonic()
    await asyncio.gather(*(_answer(backend, entry, 100 + number) for number in range(_MANY)))
    found.figures[f"answer tokens per s, {_MANY} requests at once"] = (
        _MANY * _ANSWER_TOKENS / (time.monotonic() - began)
    )


async def _answer(backend: VllmEngine, entry: ModelEntry, number: int) -> tuple[Seconds, Seconds]:
    """Times to the first and to the last token of an answer to prompt *number*."""
    began, first_s = time.monotonic(), 0.0
    request = EngineRequest(
        request_id=RequestId(f"check-{next(_ids)}"),
        model=entry.name,
        prompt=_prompt(number),
        sampling=Sampling(max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
    )
    async for _output in generate(backend, request):
        first_s = first_s or time.monotonic() - began
    return first_s, time.monotonic() - began


def _prompt(number: int) -> Tokens:
    return tuple(10 + (number + 7 * index) % 490 for index in range(_PROMPT_TOKENS))


def _since(began: float) -> Seconds:
    return round(time.monotonic() - began, 2)
