"""`headway models`: adding, checking and removing models of a registry file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.mesh import cli
from services.mesh.models import checks
from services.mesh.models.checks import parse_memory
from services.mesh.models.sources import parse_named, write_model_registry
from shared.contracts.errors import SettingsError
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from tests.queued import MODEL

OTHER = "tiny-qwen"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_tiny_models(tmp_path / "models", weights=False)
    for path in (tmp_path / "models").iterdir():
        if path.is_dir():
            (path / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path / "models"


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `headway models` and returns its exit code and output."""
    monkeypatch.setattr(checks, "find_spec", lambda _name: None)

    def run(verb: str, *arguments: object) -> tuple[int, str, str]:
        registry = ("--registry", str(tmp_path / "registry.json"))
        code = cli.main(["models", verb, *map(str, arguments), *registry])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def make_adapter(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | config))
    (path / "adapter_model.safetensors").touch()
    return path


def test_models_are_added_shown_and_removed(run: Run, directory: Path, tmp_path: Path):
    assert run("add", directory / MODEL, f"{directory / OTHER}=other")[0] == 0

    registry = ModelRegistry.load(tmp_path / "registry.json")
    assert registry.names == (MODEL, "other")
    assert registry.entry(registry.bases[1]).path == str(directory / OTHER)
    assert json.loads(run("show", "other", "--json")[1])["architecture"] == "Qwen2ForCausalLM"
    assert "other" in run("list")[1]
    assert run("remove", "other")[0] == 0
    assert [each["name"] for each in json.loads(run("list", "--json")[1])] == [MODEL]


def test_adapters_are_added_to_their_base(run: Run, directory: Path, tmp_path: Path):
    adapter = make_adapter(tmp_path / "sql")
    run("add", directory / MODEL, "--adapter", f"{MODEL}={adapter}", "--adapter",
        f"{MODEL}={adapter}=second")  # fmt: skip

    assert ModelRegistry.load(tmp_path / "registry.json").names == (MODEL, "sql", "second")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "at least one MODEL"),
        (("{models}/tiny-llama", "{models}/tiny-llama"), "'tiny-llama' exists"),
        (("--adapter", "base"), "BASE=DIR"),
        (
            ("{models}/tiny-llama", "--adapter", "unknown={models}/tiny-llama"),
            "adapter_config.json",
        ),
        (("{models}/nowhere",), "does not exist"),
        (("{models}",), "config.json is missing"),
    ],
)
def test_a_wrong_addition_changes_nothing(
    run: Run, directory: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
):
    code, _, error = run("add", *(each.format(models=directory) for each in arguments))

    assert code == 2
    assert message in error
    assert not (tmp_path / "registry.json").exists()


def test_a_model_without_weights_is_not_added(run: Run, directory: Path):
    (directory / MODEL / "model.safetensors").unlink()

    assert "no complete weights" in run("add", directory / MODEL)[2]


def test_check_computes_how_many_requests_fit(run: Run, directory: Path):
    run("add", directory / MODEL, "--max-model-len", 1024)
    # 4 layers x 2 x 64 values x 4 bytes x 1024 tokens = 2 MiB for each request
    code, output, _ = run("check", "--memory", "9MiB", "--json")
    (checked,) = json.loads(output)["models"]

    assert code == 0
    assert checked["kv_bytes_per_token"] == 2048
    assert checked["request_bytes"] == 2 << 20
    assert checked["concurrent_requests"] == 4
    code, output, _ = run("check", "--memory", "1MiB")
    assert code == 1
    assert "lower max_model_len" in output


def test_check_names_what_is_missing(run: Run, directory: Path, tmp_path: Path):
    adapter = make_adapter(tmp_path / "sql")
    run("add", directory / MODEL, "--adapter", f"{MODEL}={adapter}")
    (adapter / "adapter_model.safetensors").unlink()
    (directory / MODEL / "tokenizer.json").write_text("{")
    code, output, _ = run("check", "--memory", "1GiB")

    assert code == 1
    assert "sql has no weights" in output
    assert "cannot read the tokenizer" in output
    assert run("check", "unknown")[0] == 2


def test_up_writes_a_registry_of_the_given_models(directory: Path, tmp_path: Path):
    path = write_model_registry(
        [f"{directory / MODEL}=first", str(directory / OTHER)],
        tmp_path / "log" / "models.json",
        max_model_len=100_000,
        engine="vllm",
    )
    registry = ModelRegistry.load(path)

    assert registry.names == ("first", OTHER)
    assert registry.entry(registry.bases[0]).max_model_len == 16384
    with pytest.raises(SettingsError, match=f"'{MODEL}' exists"):
        write_model_registry([str(directory / MODEL)] * 2, path, engine="simulated")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("tensor_parallel_size=2", {"tensor_parallel_size": 2}),
        ("tensor-parallel-size=2", {"tensor_parallel_size": 2}),
        ("quantization=fp8", {"quantization": "fp8"}),
        ('hf_overrides={"a": [1]}', {"hf_overrides": {"a": [1]}}),
        ("enforce_eager=true", {"enforce_eager": True}),
    ],
)
def test_arguments_of_the_engine_become_part_of_the_entry(
    run: Run, directory: Path, tmp_path: Path, text: str, arguments: dict[str, object]
):
    path = write_model_registry(
        [str(directory / MODEL)], tmp_path / "models.json", engine="vllm", engine_args=[text]
    )
    registry = ModelRegistry.load(path)
    assert registry.entry(registry.bases[0]).engine_args == arguments
    assert run("add", directory / MODEL, "--engine-arg", text)[0] == 0


@pytest.mark.parametrize("text", ["tensor_parallel_size", "=2", "a b=1"])
def test_argument_of_another_form_is_refused(run: Run, directory: Path, text: str):
    code, _, error = run("add", directory / MODEL, "--engine-arg", text)
    assert code == 2
    assert "has not the form NAME=VALUE" in error


def test_up_serves_adapters_of_its_models(directory: Path, tmp_path: Path):
    adapter = make_adapter(tmp_path / "sql")
    path = write_model_registry(
        [str(directory / MODEL)],
        tmp_path / "log" / "models.json",
        engine="simulated",
        adapters=[f"{MODEL}={adapter}"],
    )

    assert ModelRegistry.load(path).names == (MODEL, "sql")
    with pytest.raises(SettingsError, match="no model 'other'"):
        write_model_registry(
            [str(directory / MODEL)], path, engine="simulated", adapters=[f"other={adapter}"]
        )


def test_up_takes_either_models_or_a_registry(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["up", "--model", "x", "--registry", "y"]) == 2
    assert "--model and --registry exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("24GiB", 24 << 30), ("80 gb", 80 * 10**9), ("1.5KiB", 1536), ("7", 7)]
)
def test_sizes_of_memory_are_read_with_their_units(text: str, num_bytes: int):
    assert parse_memory(text) == num_bytes


def test_a_directory_may_contain_an_equals_sign(tmp_path: Path):
    (tmp_path / "a=b").mkdir()

    assert parse_named(str(tmp_path / "a=b")) == (str(tmp_path / "a=b"), None)
    assert parse_named("org/name=n") == ("org/name", "n")


def test_splits_are_set_and_removed(run: Run, directory: Path, tmp_path: Path):
    run("add", directory / MODEL, directory / OTHER)
    code, output, _ = run("split", "chat", f"{MODEL}=95", f"{OTHER}=5", "--fallback", OTHER)
    registry = ModelRegistry.load(tmp_path / "registry.json")

    assert code == 0
    assert "95.0%" in output
    assert registry.splits[0].weights == {MODEL: 95.0, OTHER: 5.0}
    assert "unknown model" in run("split", "chat", "other=1")[2]
    assert "weight above 0" in run("split", "chat", f"{MODEL}=0")[2]
    assert "unknown model" in run("remove", OTHER)[2]
    assert run("remove", "chat")[0] == 0
    assert ModelRegistry.load(tmp_path / "registry.json").splits == ()
