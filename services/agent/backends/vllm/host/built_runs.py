"""Makes the runs of an engine, with checked requests for its core."""

from collections.abc import Callable, Iterator

from services.agent.backends.vllm.host.engine import Engine
from services.agent.backends.vllm.host.pooled_run import PooledRun
from services.agent.backends.vllm.host.runs import Run
from services.agent.backends.vllm.shared.core_ids import core_id
from services.agent.backends.vllm.shared.wire import RunOutput, Submit

EngineRun = Run | PooledRun


async def built_run(
    command: Submit,
    engine: Engine,
    numbers: Iterator[int],
    *,
    on_output: Callable[[RunOutput], None],
    on_error: Callable[[EngineRun, Exception], None],
) -> EngineRun:
    """
    The run of *command*, which has not begun.

    Args:
        command: The run; not that of a call.
        engine: Engine of the run's model.
        numbers: Numbers of runs in the engine's core.
        on_output: Called with each output of the run.
        on_error: Called with the run and the error that ends it.

    Raises:
        EngineDeadError: The core has died.
        Exception: The request is invalid.
    """
    request = command.request
    if request.input_lengths:
        names = [core_id(request.request_id, next(numbers)) for _ in request.input_lengths]
        tasks = await engine.tasks()
        with engine.giving_back(*names):
            adapters = [await engine.adapter(command, name) for name in names]
            inputs = engine.requests.build_pooled(command, names, tasks, adapters)
        return PooledRun(request, inputs, engine, on_output=on_output, on_error=on_error)
    name = core_id(request.request_id, next(numbers))
    with engine.giving_back(name):
        adapter = await engine.adapter(command, name)
        built, end = engine.requests.build(command, name, adapter)
    if built is None:
        engine.give_back(name)
    return Run(request, built, engine, end, on_output=on_output, on_error=on_error)
