"""
Preemption inside a vLLM worker: leaves a forward pass between two layers (ConServe §4.3).

The module uses private interfaces of vLLM; the contract suite fails when these change.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.outputs import ModelRunnerOutput

from services.agent.backends.vllm.core.layer_preemption import ORDER
from services.agent.backends.vllm.shared.core_settings import core_settings
from services.agent.backends.vllm.shared.preemptible_work import SafepointOrder
from services.agent.backends.vllm.shared.safepoint_support import safepoint_places
from services.agent.backends.vllm.shared.safepoints import SafepointCore, safepoints_path


class _Cut(BaseException):
    """Ends a preempted forward pass; a BaseException, so that neither models nor vLLM catch it."""


class Safepoints:
    """Mixin over a vLLM worker that checks between layers whether the iteration is preempted."""

    vllm_config: Any
    model_runner: Any
    _order: SafepointOrder | None = None

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)  # type: ignore[misc]  # a mixin
        settings = core_settings(self.vllm_config.additional_config)
        self._memory = SafepointCore(safepoints_path(Path(settings.stats_path)))
        layers = tuple(decoder_layers(self.model_runner.model, self.vllm_config))
        if not layers:
            raise ValueError(
                "no decoder layers were found for safepoints; "
                "set engine.vllm.safepoint_layers to 0 to serve this model without them"
            )
        for place in safepoint_places(len(layers), settings.safepoint_layers):
            layers[place].register_forward_pre_hook(self._safepoint)

    def execute_model(self, scheduler_output: Any) -> Any:
        order = getattr(scheduler_output, ORDER, None)
        if order is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]  # a mixin
        self._order = order
        try:
            return super().execute_model(scheduler_output)  # type: ignore[misc]  # a mixin
        except _Cut:
            pass
        finally:
            self._order = None
        counts = scheduler_output.num_scheduled_tokens
        self._memory.cut(order.number, sum(counts[name] for name in order.droppable))
        rest = without(scheduler_output, order.droppable)
        if rest is None:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        return super().execute_model(rest)  # type: ignore[misc]  # a mixin

    def _safepoint(self, *_: Any) -> None:
        order = self._order
        if order is None:
            return
        self.catch_up()
        if order.at_once or self._memory.is_wanted(order.number):
            raise _Cut

    def catch_up(self) -> None:
        """Wait until the device has almost reached the layer that begins; no-op on a CPU."""


def decoder_layers(model: Any, vllm_config: Any) -> Iterator[Any]:
    """Modules of *model* in order, each of which holds one attention with KV."""
    attentions = {
        id(each) for each in vllm_config.compilation_config.static_forward_context.values()
    }
    seen: set[str] = set()
    for name, module in model.named_modules():
        if id(module) not in attentions:
            continue
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is None:
            continue
        path = ".".join(parts[: number + 1])
        if path not in seen:
            seen.add(path)
            yield model.get_submodule(path)


def without(scheduler_output: Any, droppable: frozenset[str]) -> Any:
    """
    The iteration without the requests in *droppable*; None if no request remains.

    The runner has already processed the whole iteration, so its state includes the new requests and
    the new blocks.
    """
    counts = {
        name: count
        for name, count in scheduler_output.num_scheduled_tokens.items()
        if name not in droppable
    }
    if not counts:
        return None
    computed = {
        new.req_id: (new.num_computed_tokens, 0) for new in scheduler_output.scheduled_new_reqs
    }
    cached = scheduler_output.scheduled_cached_reqs
    for name, num_computed, num_output in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        computed[name] = num_computed, num_output
    return replace(
        scheduler_output,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(counts),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(counts),
            num_computed_tokens=[computed[name][0] for name in counts],
            num_output_tokens=[computed[name][1] for name in counts],
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )
