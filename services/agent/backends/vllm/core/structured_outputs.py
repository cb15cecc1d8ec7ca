"""
Structured outputs in an engine core that starts without a tokenizer, for runs that may be resumed.

The module uses private interfaces of vLLM; the contract suite fails when these change.
"""

from concurrent.futures import Future
from copy import copy
from typing import Any

from vllm.v1.engine import FinishReason
from vllm.v1.structured_output import StructuredOutputManager

from services.agent.backends.vllm.core.compile_threads import CompileThreads
from services.agent.backends.vllm.shared.core_settings import core_settings
from services.agent.backends.vllm.shared.qos import qos_in_core

NUM_THREADS = 4
"""Number of grammars that are compiled at once; more than one, since single ones may be slow."""
MAX_LATE = 8
"""Number of grammars over their limit of time beside which others are compiled."""


class ResumingGrammars(StructuredOutputManager):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    vLLM's manager of grammars, in which a grammar continues after the progress of earlier runs.

    The tokenizer is loaded for the first request that needs it: for large vocabularies it occupies
    hundreds of megabytes. Any error ends only its own request.
    """

    def grammar_init(self, request: Any) -> None:
        if not request.use_structured_output:
            return
        try:
            if not hasattr(self, "tokenizer"):
                # vLLM's own constructor also creates the reasoning parser and the thread pool.
                StructuredOutputManager.__init__(self, _with_tokenizer(self.vllm_config))
                settings = core_settings(self.vllm_config.additional_config)
                self.executor = CompileThreads(
                    limit_s=settings.grammar_timeout_s,
                    num_threads=NUM_THREADS,
                    max_late=MAX_LATE,
                    key_of=lambda request: request.structured_output_request.structured_output_key,
                )
            super().grammar_init(request)
        except Exception as error:  # noqa: BLE001 - the core reports the reason with the request
            failed: Future[Any] = Future()
            failed.set_exception(error)
            request.structured_output_request.grammar = failed

    def _create_grammar(self, request: Any) -> Any:
        """
        Create the request's grammar in the state after the progress.

        vLLM calls this method in the thread pool, before it schedules the request.
        """
        grammar = super()._create_grammar(request)
        if not grammar.accept_tokens(request.request_id, self._constrained_progress(request)):
            raise ValueError("the tokens of earlier runs do not follow the grammar")
        return grammar

    def _constrained_progress(self, request: Any) -> list[int]:
        """The tokens of earlier runs that the grammar constrained: those after the reasoning."""
        prompt = list(request.prompt_token_ids)
        begin = len(prompt) - qos_in_core(request).progress_tokens
        progress = prompt[begin:]
        if not progress:
            return []
        structured, reasoner = request.structured_output_request, self._get_reasoner(request)
        if reasoner is not None and structured.reasoning_ended is None:
            # Set this explicitly: vLLM would count an end of reasoning in the progress as one in
            # the prompt.
            structured.reasoning_ended = reasoner.is_reasoning_end(prompt[:begin])
        start, _ = self._get_constraint_bounds(request, progress, spec_tokens_committed=True)
        if start > len(progress):  # the reasoning has not ended
            return []
        structured.reasoning_ended = True
        return progress[start:]


def _with_tokenizer(config: Any) -> Any:
    """A copy of a `VllmConfig`, with which vLLM loads the tokenizer."""
    config, model_config = copy(config), copy(config.model_config)
    model_config.skip_tokenizer_init = False
    config.model_config = model_config
    return config


class Structured:
    """
    Mixin over a vLLM scheduler for structured outputs.

    The engine core creates the manager and passes it to the scheduler, so this class replaces the
    class of the manager.
    """

    requests: dict[str, Any]
    grammar_compile_error_reqs: set[str]

    def __init__(self, *args: Any, structured_output_manager: Any, **kwargs: Any) -> None:
        structured_output_manager.__class__ = ResumingGrammars
        super().__init__(  # type: ignore[call-arg]  # a mixin
            *args, structured_output_manager=structured_output_manager, **kwargs
        )

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """
        Call vLLM's method; write the error of a failed grammar into `stop_reason` of the request's
        output.
        """
        errors = {
            request_id: self.requests[request_id].structured_output_request.grammar
            for request_id in self.grammar_compile_error_reqs & self.requests.keys()
        }
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]  # a mixin
        if errors:
            for each in result.values():
                for output in each.outputs:
                    if output.finish_reason == FinishReason.ERROR and output.request_id in errors:
                        output.stop_reason = f"no grammar: {errors[output.request_id]}"
        return result
