"""VLLM's model classes: their early import, and whether vLLM serves a model."""

from collections.abc import Iterable

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

from shared.contracts.models import ModelEntry


def import_architectures(architectures: Iterable[str]) -> None:
    """
    Import model classes on a CPU, so that vLLM starts no process to inspect each class.

    Such a process would import all of vLLM again. No-op on a GPU, where importing models could
    initialize the device.
    """
    if not current_platform.is_cpu():
        return
    for architecture in architectures:
        # VLLM makes classifiers of classes that generate.
        base = architecture.replace("ForSequenceClassification", "ForCausalLM")
        for name in (architecture, base):
            lazy = ModelRegistry.models.get(name)
            if lazy is not None:
                ModelRegistry.register_model(name, lazy.load_model_cls())
                break


def unsupported_reason(entry: ModelEntry) -> str | None:
    """
    Why vLLM does not serve the model; None if it does. The weights are not read.

    The import of a model's class takes seconds.
    """
    try:
        import_architectures([entry.architecture])
        AsyncEngineArgs(
            model=entry.path,
            max_model_len=entry.max_model_len,
            runner="pooling" if entry.pools else "generate",
        ).create_model_config()
    except Exception as error:  # noqa: BLE001 - any error of vLLM is the reason
        return _first_reason(str(error)) or type(error).__name__
    return None


def _first_reason(text: str) -> str:
    """The line of an error of vLLM's that has the reason, without its list of architectures."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if not line.startswith(("1 validation error", "For further"))]
    return reasons[0][:300] if reasons else ""
