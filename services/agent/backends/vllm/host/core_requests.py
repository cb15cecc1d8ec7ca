"""Builds and checks requests for one engine core. Runs in the engine host."""

import time
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from services.agent.backends.base import EngineRequest
from services.agent.backends.vllm.host.answer_end import AnswerEnd, detokenizer_of
from services.agent.backends.vllm.host.images import IMAGE, checked_images
from services.agent.backends.vllm.host.sampling import answer_params, run_params
from services.agent.backends.vllm.shared.qos import QOS_KEY, qos_of, vllm_priority
from services.agent.backends.vllm.shared.wire import Submit
from services.engine_core.encoding import decode_request, decode_requests


class CoreRequests:
    """
    Requests for one engine core. vLLM's own checks protect the core, which trusts its requests.

    The checks are private to vLLM; the contract suite fails when they change.

    Args:
        config: `VllmConfig` of the engine, which may still reduce the model's maximum length.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._vocab_size = config.model_config.get_vocab_size()
        is_generating = config.model_config.runner_type == "generate"
        self._tasks = ("generate",) if is_generating else ()
        # vLLM checks grammars only if there is a tokenizer, but checks for xgrammar do not use it.
        tokenizer = SimpleNamespace(max_token_id=self._vocab_size - 1, eos_token_id=None)
        self._vllm = InputProcessor(config, SimpleNamespace(tokenizer=tokenizer, _executor=None))
        self._max_images = 0
        if self.reads_images:
            multimodal = config.model_config.multimodal_config
            self._max_images = multimodal.get_limit_per_prompt(IMAGE)

    @property
    def reads_images(self) -> bool:
        """True if the engine core may have a cache of what it computes of images."""
        return bool(self._config.model_config.supports_multimodal_inputs)

    def build(
        self, command: Submit, core_id: str, adapter: LoRARequest | None = None
    ) -> tuple[EngineCoreRequest | None, AnswerEnd]:
        """
        The request of a run, which continues after the progress, and the end of its answer.

        There is no request if the progress is the whole answer.

        Args:
            command: The run.
            core_id: Id of the run in the engine core.
            adapter: Adapter of the run, which the core has loaded.

        Raises:
            ValueError: The prompt, an image or a sampling parameter is invalid; the message names
                it.
            ContractError: The payload cannot be decoded.
        """
        request = command.request
        prompt = [*request.prompt, *request.progress]
        encoded = decode_request(request.payload) if request.payload else None
        answer = answer_params(command, encoded, self._vllm.generation_config_fields)
        self._check_prompt(prompt)
        images = self._images(encoded, len(request.prompt))
        end = self._end(command, encoded, answer)
        if end.reached:
            return None, end
        params = run_params(answer, request, self._config)
        watermarking = self._vllm._validate_params(params, self._tasks)  # noqa: SLF001 - see the class
        self._vllm.apply_watermarking(params, watermarking)
        built = EngineCoreRequest(
            request_id=core_id,
            prompt_token_ids=prompt,
            mm_features=images,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=adapter,
            cache_salt=encoded.cache_salt if encoded else None,
            data_parallel_rank=None,
            priority=vllm_priority(request),
            reasoning_parser_kwargs=encoded.reasoning_parser_kwargs if encoded else None,
        )
        return built, end

    def build_pooled(
        self,
        command: Submit,
        core_ids: Sequence[str],
        tasks: tuple[str, ...],
        adapters: Sequence[LoRARequest | None],
    ) -> list[EngineCoreRequest]:
        """
        The requests of a run of a pooling model, one for each input.

        Args:
            command: The run.
            core_ids: Ids of the inputs in the engine core.
            tasks: Tasks of the engine core, which dies of a request for another task.
            adapters: Adapter of each input, which the core has loaded.

        Raises:
            ValueError: An input or a pooling parameter is invalid; the message names it.
            ContractError: The payload cannot be decoded.
        """
        request, ends = command.request, accumulate(command.request.input_lengths)
        encoded = decode_requests(request.payload) if request.payload else []
        if len(encoded) != len(core_ids):
            raise ValueError(f"{len(core_ids)} inputs have {len(encoded)} encoded requests")
        prompts = [
            list(request.prompt[end - length : end])
            for length, end in zip(request.input_lengths, ends, strict=True)
        ]
        return [
            self._pooled(request, each, prompt, core_id, tasks=tasks, adapter=adapter)
            for each, prompt, core_id, adapter in zip(
                encoded, prompts, core_ids, adapters, strict=True
            )
        ]

    def _pooled(
        self,
        request: EngineRequest,
        encoded: EngineCoreRequest,
        prompt: list[int],
        core_id: str,
        *,
        tasks: tuple[str, ...],
        adapter: LoRARequest | None,
    ) -> EngineCoreRequest:
        """The request of one input."""
        params = encoded.pooling_params
        if encoded.mm_features:
            raise ValueError("pooling models of the mesh read no images")
        if params is None:
            raise ValueError("the encoded request has no pooling parameters")
        if params.late_interaction_params is not None:
            raise ValueError("a document cannot be compared with a query inside an engine")
        self._check_prompt(prompt)
        self._vllm._validate_params(params, tasks)  # noqa: SLF001 - see the class
        params.extra_kwargs = (params.extra_kwargs or {}) | {
            QOS_KEY: msgspec.to_builtins(qos_of(request))
        }
        return EngineCoreRequest(
            request_id=core_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=None,
            pooling_params=params,
            arrival_time=time.time(),
            lora_request=adapter,
            cache_salt=encoded.cache_salt,
            data_parallel_rank=None,
            priority=vllm_priority(request),
        )

    def _end(
        self, command: Submit, encoded: EngineCoreRequest | None, params: SamplingParams
    ) -> AnswerEnd:
        """The end of a run's answer; the agent finds stop strings of runs without payload."""
        detokenizer = None
        if encoded is not None and params.stop:
            encoded.prompt_token_ids = list(command.request.prompt)
            detokenizer = detokenizer_of(encoded, self._config.model_config)
        return AnswerEnd(detokenizer, params, command.request.progress)

    def _images(
        self, encoded: EngineCoreRequest | None, prompt_tokens: int
    ) -> list[MultiModalFeatureSpec] | None:
        return checked_images(
            encoded.mm_features if encoded else None,
            prompt_tokens=prompt_tokens,
            max_images=self._max_images,
            max_embeds=self._vllm.mm_encoder_cache_size,
        )

    def _check_prompt(self, prompt: list[int]) -> None:
        self._vllm._validate_prompt_len(len(prompt), "decoder")  # noqa: SLF001 - see the class
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise ValueError(f"a token id is outside the model's vocabulary of {self._vocab_size}")
