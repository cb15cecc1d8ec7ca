"""The program that writes the registry of a mesh of containers."""

import json
from pathlib import Path

import pytest

from services.mesh.models import provide
from services.mesh.models.provide import AGENT, PROGRAM, REGISTRY
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models
from tests.agents.openai_server import OpenAiServer


def provided(directory: Path, *arguments: str) -> ModelRegistry:
    """Registry after a run of the program that ends well."""
    assert PROGRAM.main(["--dir", str(directory), *arguments]) == 0
    return ModelRegistry.load(directory / REGISTRY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model with weights."""
    directory = tmp_path_factory.mktemp("mounted")
    make_tiny_models(directory)
    return directory / "tiny-llama"


def test_tiny_models_are_made_without_a_model_and_a_server(tmp_path: Path):
    assert set(provided(tmp_path).bases) == set(TINY_MODELS)


def test_a_registry_of_the_user_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / REGISTRY).write_text('{"models": []}')

    assert provided(tmp_path, "--model", "org/name").bases == ()
    assert "user's own" in capsys.readouterr().out


def test_the_registry_follows_the_selected_profile(tmp_path: Path, model: Path):
    mounted = ("--mounted", str(model))

    assert set(provided(tmp_path).bases) == set(TINY_MODELS)
    assert provided(tmp_path, "--model", "./models/mine", *mounted).bases == ("mine",)
    assert provided(tmp_path, "--model", "./models/mine/=other", *mounted).bases == ("other",)
    assert set(provided(tmp_path).bases) == set(TINY_MODELS)


def test_weights_of_a_mounted_model_stay_in_the_mount(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    weights = (model / "model.safetensors").stat().st_size
    monkeypatch.setattr(provide, "COPIED_BYTES", weights - 1)

    registry = provided(tmp_path, "--model", "mine", "--mounted", str(model))

    directory = Path(registry.entry(registry.bases[0]).path)
    assert directory.is_relative_to(tmp_path)
    assert (directory / "model.safetensors").readlink() == model / "model.safetensors"
    assert not (directory / "tokenizer.json").is_symlink()
    assert registry.entry(registry.bases[0]).weight_bytes == weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "./nothing"), "./nothing is not a model: config.json is missing"),
        (("--model", "nothing"), "is not an id of the hub, which has the form org/name"),
        (("--model", "m", "--attach", "http://a:1"), "not both"),
        (("--attach", "http://127.0.0.1:9"), "lists none as models"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused(
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "empty").mkdir()
    mounted = ("--mounted", str(tmp_path / "empty"))

    assert PROGRAM.main(["--dir", str(tmp_path), *mounted, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_may_not_be_read_is_named_with_what_to_do(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name != "model.safetensors")

    assert PROGRAM.main(["--dir", str(tmp_path), "--model", "mine", "--mounted", str(model)]) == 2
    error = capsys.readouterr().err
    assert f"may not read {model / 'model.safetensors'}; run `chmod -R a+rX`" in error


async def test_an_attached_server_gets_an_entry_and_settings_of_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_ATTACH_API_KEY", "secret")
    async with OpenAiServer(model="org/served").serving() as url:
        entry = await provide.attach_server(tmp_path, f"mine={url}")

    settings = json.loads((tmp_path / AGENT).read_text())
    assert (entry.name, entry.takes) == ("mine", "bodies")
    assert settings == {
        "models": ["mine"],
        "engine": {"backend": "remote", "remote": {"url": url, "model": "org/served"}},
    }
