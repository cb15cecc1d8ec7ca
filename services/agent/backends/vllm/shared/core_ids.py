"""Ids of requests in the engine core; imports no vLLM."""

from shared.contracts.base import RequestId


def core_id(run: RequestId, number: int) -> str:
    """
    Id of a run in the engine core.

    Args:
        run: The run.
        number: A different number for each run: the core may still send outputs of an aborted run
            with the same id.
    """
    return f"{run}-{number}"


def run_of(core_id: str) -> RequestId:
    """The run with this id in the engine core."""
    return RequestId(core_id.rpartition("-")[0])


def answer_run(run: RequestId, index: int) -> RequestId:
    """The run of one answer of a call, whose run is *run*."""
    return RequestId(f"{run}/{index}")
