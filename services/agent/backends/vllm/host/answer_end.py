"""Ends of answers that an engine core does not find. Runs in the engine host."""

from typing import Any

from vllm import SamplingParams
from vllm.tokenizers.registry import cached_get_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from shared.contracts.requests import Tokens


class AnswerEnd:
    """
    Finds stop strings, for which vLLM's rule needs the text, and ends that the progress contains.

    Args:
        detokenizer: Makes the text of the answer, in its initial state; None: no stop strings.
        params: Parameters of the whole answer.
        progress: Tokens of earlier runs.
    """

    def __init__(self, detokenizer: Any | None, params: SamplingParams, progress: Tokens) -> None:
        self._detokenizer = detokenizer
        self.reached = False
        """True once a stop string or the progress has ended the answer."""
        for token in progress:
            self.push((token,), stopped=False)
        ends = {*(params.stop_token_ids or ()), params.eos_token_id}
        if progress and len(progress) >= params.min_tokens and progress[-1] in ends:
            self.reached = True

    def push(self, token_ids: Tokens, *, stopped: bool) -> Tokens:
        """
        Append the tokens of one step.

        Args:
            token_ids: The tokens.
            stopped: True if the last token is a stop token, whose text does not count.

        Returns:
            The tokens that belong to the answer.
        """
        if self._detokenizer is None:
            return token_ids
        before = self._detokenizer.num_output_tokens()
        if self._detokenizer.update(list(token_ids), stopped) is not None:
            self.reached = True
        return token_ids[: self._detokenizer.num_output_tokens() - before]


def detokenizer_of(request: EngineCoreRequest, model_config: Any) -> Any:
    """
    VLLM's detokenizer for the answer to *request*. Blocks until the tokenizer is loaded, which
    happens once for each model.
    """
    tokenizer = cached_get_tokenizer(
        model_config.tokenizer,
        runner_type=model_config.runner_type,
        tokenizer_mode=model_config.tokenizer_mode,
        revision=model_config.tokenizer_revision,
        trust_remote_code=model_config.trust_remote_code,
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, request)
