"""Detection of repetition in answers of several runs. Runs in the engine core."""

from typing import Any

from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.request import RequestStatus

from services.agent.backends.vllm.shared.qos import qos_in_core


class CountsRepetitions:
    """Mixin over a vLLM scheduler: a repetition may begin in the progress of earlier runs."""

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """Append tokens to a request; the second value is true at the end of the answer."""
        kept, stopped = super()._update_request_with_output(  # type: ignore[misc]  # a mixin
            request, new_token_ids, *args, **kwargs
        )
        if not stopped and kept and _repeats(request):
            request.status = RequestStatus.FINISHED_REPETITION
            stopped = True
        return kept, stopped


def _repeats(request: Any) -> bool:
    """Return whether the progress and the output tokens end with a repetition."""
    params = request.sampling_params.repetition_detection
    if params is None or request.num_output_tokens < request.sampling_params.min_tokens:
        return False
    progress = qos_in_core(request).progress_tokens
    if not progress:
        return False  # vLLM has looked at all tokens
    prompt = request.prompt_token_ids
    answer = [*prompt[len(prompt) - progress :], *request.output_token_ids]
    return bool(check_sequence_repetition(answer, params))
