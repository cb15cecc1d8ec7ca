"""Variables for vLLM in a process that needs no device, for example a gateway."""

import os

WITHOUT_DEVICE = {"VLLM_TARGET_DEVICE": "cpu"}
"""Variables with which vLLM looks for no GPU."""
_FOR_VLLM = WITHOUT_DEVICE | {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_own: set[str] = set()
"""Names of the variables that `use_no_device` has set."""


def use_no_device() -> None:
    """Set the variables in this process, before it imports vLLM; it keeps those that it has."""
    for name, value in _FOR_VLLM.items():
        if name not in os.environ:
            os.environ[name] = value
            _own.add(name)


def inherited() -> dict[str, str]:
    """
    Variables that an engine host inherits from this process.

    An agent may be in the process of a gateway, whose engines need the device nevertheless.
    """
    return {name: value for name, value in os.environ.items() if name not in _own}
