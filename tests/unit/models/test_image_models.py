"""Models that read images: files, digests, sizes and arguments of their engines."""

from pathlib import Path

import pytest

from services.agent.backends.checks import vocab_size_of
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.arguments import engine_arguments
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.models.digest import tokenizer_digest
from shared.models.files.model_files import PROCESSOR_FILES, has_processor
from shared.models.files.sizes import kv_bytes_per_token
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_IMAGE_MODELS, TINY_MODELS, make_tiny_models
from shared.models.tiny_tokenizer import IMAGE_ID
from shared.models.tokenizer import Tokenizer
from tests.queued import MODEL

(IMAGE_MODEL,) = map(ModelName, TINY_IMAGE_MODELS)


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    models = TINY_IMAGE_MODELS | TINY_MODELS
    return ModelRegistry.load(make_tiny_models(tmp_path, weights=False, models=models))


@pytest.fixture
def entry(registry: ModelRegistry) -> ModelEntry:
    return registry.entry(IMAGE_MODEL)


def test_only_models_that_read_images_have_a_processor(
    registry: ModelRegistry, entry: ModelEntry
) -> None:
    assert has_processor(entry)
    assert not has_processor(registry.entry(MODEL))


@pytest.mark.parametrize("name", PROCESSOR_FILES)
def test_another_processor_changes_the_digest(entry: ModelEntry, name: str) -> None:
    before = tokenizer_digest(entry)
    file = Path(entry.path) / name
    file.write_text(file.read_text() + " ")

    assert tokenizer_digest(entry) != before


def test_image_is_one_token_of_the_text(entry: ModelEntry) -> None:
    tokenizer = Tokenizer.load(Path(entry.path))

    assert tokenizer.encode("a<image>b").count(IMAGE_ID) == 1
    assert tokenizer.vocab_size == vocab_size_of(entry)


def test_kv_of_the_language_model_has_its_size(registry: ModelRegistry, entry: ModelEntry) -> None:
    assert kv_bytes_per_token(entry) == kv_bytes_per_token(registry.entry(MODEL)) > 0


def test_engine_has_the_tokenizer_and_no_cache_of_images(
    registry: ModelRegistry, entry: ModelEntry, tmp_path: Path
) -> None:
    def arguments(of: ModelEntry) -> dict[str, object]:
        return engine_arguments(of, VllmSettings(), is_cpu=True, stats_path=tmp_path / "stats")

    assert arguments(entry)["skip_tokenizer_init"] is False
    assert arguments(entry)["mm_processor_cache_gb"] == 0
    assert arguments(registry.entry(MODEL))["skip_tokenizer_init"] is True
