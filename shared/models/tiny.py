"""Tiny models with random weights, for tests and the demo."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.models.registry import write_registry
from shared.models.tiny_adapter import TinyAdapter, make_tiny_adapter
from shared.models.tiny_image import TinyImageArchitecture
from shared.models.tiny_tokenizer import EOS_IDS, write_tokenizer
from shared.models.tiny_weights import TinyArchitecture

_VERSION = 1
"""Version of the generated content; increment it on changes, so that cached models are rebuilt."""

TINY_MODELS = {
    "tiny-llama": TinyArchitecture(architecture="LlamaForCausalLM", model_type="llama", seed=1),
    "tiny-llama-b": TinyArchitecture(architecture="LlamaForCausalLM", model_type="llama", seed=2),
    "tiny-qwen": TinyArchitecture(
        architecture="Qwen2ForCausalLM", model_type="qwen2", seed=3, qkv_bias=True
    ),
}
TINY_POOLING_MODELS = {
    "tiny-embed": TinyArchitecture(
        architecture="LlamaForCausalLM", model_type="llama", seed=4, task="embed"
    ),
    "tiny-classify": TinyArchitecture(
        architecture="LlamaForSequenceClassification",
        model_type="llama",
        seed=5,
        task="classify",
        num_labels=3,
    ),
    "tiny-score": TinyArchitecture(
        architecture="LlamaForSequenceClassification",
        model_type="llama",
        seed=6,
        task="classify",
        num_labels=1,
    ),
}
"""Models that make vectors, scores of three classes, and one score for a pair of texts."""
TINY_IMAGE_MODELS = {"tiny-idefics3": TinyImageArchitecture(seed=7)}
"""Models that read images and generate text."""
AnyArchitecture = TinyArchitecture | TinyImageArchitecture
MAX_MODEL_LEN = 4096


class _Stamp(msgspec.Struct, frozen=True):
    version: int
    weights: bool


def make_tiny_models(
    directory: Path,
    *,
    weights: bool = True,
    models: Mapping[str, AnyArchitecture] = TINY_MODELS,
) -> Path:
    """
    Create tiny models under *directory*, unless they exist.

    Args:
        directory: Directory, created if missing; of its other content only `registry.json` is
            overwritten.
        weights: False for engines that need no weights; safetensors is not needed then.
        models: Name -> architecture; by default several models of two architectures.

    Returns:
        Path of the registry file of the models.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, architecture in models.items():
        if not _fresh(directory / name, weights=weights):
            _make(directory / name, architecture, weights=weights)
    registry = directory / "registry.json"
    draft = directory / f".registry.{os.getpid()}.json"
    write_registry(draft, (_entry(*each) for each in models.items()))
    draft.replace(registry)
    return registry


def _fresh(path: Path, *, weights: bool) -> bool:
    try:
        stamp = msgspec.json.decode((path / "stamp.json").read_bytes(), type=_Stamp)
    except (OSError, msgspec.DecodeError):
        return False
    return stamp.version == _VERSION and (stamp.weights or not weights)


def _make(path: Path, architecture: AnyArchitecture, *, weights: bool) -> None:
    """
    Create one model in a temporary directory, and move it into place.

    Readers therefore never find an incomplete model.
    """
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        (draft / "config.json").write_bytes(_formatted(architecture.config()))
        reads_images = isinstance(architecture, TinyImageArchitecture)
        write_tokenizer(draft, reads_images=reads_images)
        if isinstance(architecture, TinyImageArchitecture):
            for name, content in architecture.processor_files().items():
                (draft / name).write_bytes(_formatted(content))
        if weights:
            architecture.save_weights(draft / "model.safetensors")
        stamp = _Stamp(version=_VERSION, weights=weights)
        (draft / "stamp.json").write_bytes(msgspec.json.encode(stamp))
        draft.chmod(0o755)
        shutil.rmtree(path, ignore_errors=True)
        try:
            draft.rename(path)
        except OSError:
            # Another process created an equivalent model between the two calls.
            if not _fresh(path, weights=weights):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _formatted(content: dict[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=2)


def _entry(name: str, architecture: AnyArchitecture) -> ModelEntry:
    return ModelEntry(
        name=ModelName(name),
        path=name,
        architecture=architecture.architecture,
        task=architecture.task,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=EOS_IDS,
        weight_bytes=architecture.weight_bytes,
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line of `python -m shared.models.tiny`."""
    parser = argparse.ArgumentParser(prog="python -m shared.models.tiny", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help=("directory in which the models are created")
    )
    parser.add_argument(
        "--no-weights",
        action="store_true",
        help=("omit the weights, which simulated engines do not need"),
    )
    parser.add_argument(
        "--adapters",
        type=int,
        default=0,
        metavar="N",
        help="also make N LoRA adapters of tiny-llama in OUT/adapters, for `headway models add`",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON line instead of text")
    options = parser.parse_args(arguments)
    try:
        registry = make_tiny_models(options.out, weights=not options.no_weights)
        for number in range(1, options.adapters + 1):
            directory = options.out / "adapters" / f"adapter-{number}"
            make_tiny_adapter(directory, TinyAdapter(base=TINY_MODELS["tiny-llama"], seed=number))
    except (OSError, ImportError) as error:
        sys.stderr.write(f"cannot make the tiny models: {error}\n")
        return 1
    names = list(TINY_MODELS)
    if options.json:
        line = msgspec.json.encode({"registry": str(registry), "models": names}).decode()
    else:
        line = f"{', '.join(names)} in {registry}"
    sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
