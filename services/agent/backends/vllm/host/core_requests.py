"""Builds and checks requests for one engine core. Runs in the engine host."""

import time
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from services.agent.backends.vllm.host.sampling import sampling_params
from services.agent.backends.vllm.shared.qos import vllm_priority
from services.agent.backends.vllm.shared.wire import Submit
from services.engine_core.payload import decode_request


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

    def build(self, command: Submit, core_id: str) -> EngineCoreRequest:
        """
        The request of a run, which continues after the progress.

        Args:
            command: The run.
            core_id: Id of the run in the engine core.

        Raises:
            ValueError: The prompt or a sampling parameter is invalid; the message names it.
            ContractError: The payload cannot be decoded.
        """
        request = command.request
        prompt = [*request.prompt, *request.progress]
        encoded = decode_request(request.payload) if request.payload else None
        params = sampling_params(
            command,
            encoded,
            config=self._config,
            generation_config=self._vllm.generation_config_fields,
        )
        self._check_prompt(prompt)
        watermarking = self._vllm._validate_params(params, self._tasks)  # noqa: SLF001 - see the class
        self._vllm.apply_watermarking(params, watermarking)
        return EngineCoreRequest(
            request_id=core_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=encoded.cache_salt if encoded else None,
            data_parallel_rank=None,
            priority=vllm_priority(request),
            reasoning_parser_kwargs=encoded.reasoning_parser_kwargs if encoded else None,
        )

    def _check_prompt(self, prompt: list[int]) -> None:
        self._vllm._validate_prompt_len(len(prompt), "decoder")  # noqa: SLF001 - see the class
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise ValueError(f"a token id is outside the model's vocabulary of {self._vocab_size}")
