"""Early import of vLLM's model classes."""

from collections.abc import Iterable

from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform


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
