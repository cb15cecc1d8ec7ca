"""What the host says of a run, on its way to whoever reads it."""

from services.agent.backends.stream import OutputStream
from services.agent.backends.vllm.wire import RunOutput
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason

_FINISHES = frozenset({"", *(reason.value for reason in FinishReason)})
"""What ends an answer well; vLLM also knows `abort`, `error` and `repetition`."""


def deliver(run: RunOutput, stream: OutputStream) -> None:
    """Push new tokens of *run*, or its failure."""
    if run.finish not in _FINISHES:
        stream.fail(EngineError(f"the engine ended the run: {run.finish}"))
        return
    stream.push(
        run.token_ids,
        FinishReason(run.finish) if run.finish else None,
        cached_tokens=run.cached_tokens,
        prefill_s=run.prefill_s,
    )
