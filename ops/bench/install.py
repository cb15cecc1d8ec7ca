"""
What a newcomer waits for, and what a gateway of many models takes: both without vLLM.

The first part makes a new virtual environment, installs the wheel of this checkout with the extra
`mesh`, starts `headway up` with simulated engines and the broker in memory, and asks for one chat.
pip's cache is not used, so packages are downloaded, unless the machine's settings of pip name a
folder that has them. Building the wheel does not count.

The second part starts a gateway alone, on RabbitMQ, with 20 models whose
vocabularies have 128,000 entries. Such a gateway reads no tokenizers. As in an installation, its
modules are compiled before: a start that is not counted does it.
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ops.bench.progress import say
from ops.bench.result import Line, Result, spread
from ops.clients.packing import run_builder
from ops.environment import broker_for
from ops.ports import free_port
from ops.release.files import headway_wheel
from services.mesh.processes import MeshProcess
from services.mesh.spec import EMBEDDED, MeshSpec
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import write_registry

MOST_INSTALL_S, MOST_START_S, MOST_MEMORY_MB = 60.0, 2.0, 120.0
STARTS = 5
MANY_MODELS = 20
VOCABULARY = 128_000
INSTALL = ("install", "--no-compile")
"""Arguments of README's pip. Modules are compiled when they are first imported."""
UP = ("up", "--broker", EMBEDDED, "--engine", "simulated")
WITHOUT = ("torch", "vllm")
"""Modules that only the extra `vllm` installs."""
READY_S: Seconds = 120.0
_POLL_S: Seconds = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A new environment, from nothing to the first answer."""

    environment_s: Seconds
    install_s: Seconds
    ready_s: Seconds
    """From the start of the command until the gateway is ready."""
    answer_s: Seconds
    """From then until the whole answer."""
    disk_mb: float
    unwanted: Sequence[str]
    """Those of `WITHOUT` that the environment has."""

    @property
    def total_s(self) -> Seconds:
        """Time of all steps."""
        return self.environment_s + self.install_s + self.ready_s + self.answer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """One start of a gateway."""

    ready_s: Seconds
    peak_mb: float
    """Highest resident memory until it has listed its models."""
    tokenizers: bool
    """True if the process has loaded the library of tokenizers."""


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """
    Run the benchmark; a quick run measures only the gateway.

    Raises:
        SettingsError: There is no RabbitMQ, or pip cannot install the wheel.
    """
    result = Result(name="install", seed=seed, quick=quick)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with broker_for(broker) as (url, line), tempfile.TemporaryDirectory() as directory:
        if url == EMBEDDED:
            raise SettingsError(f"this benchmark needs RabbitMQ; {line}")
        root = Path(directory)
        result.figures["load of the machine before the starts"] = os.getloadavg()[0]
        starts = await _starts(root, url, seed)
        installed = None
        if not quick:
            result.figures["load of the machine before the installation"] = os.getloadavg()[0]
            installed = installation(root)
    report(result, starts, installed)
    return result


def report(result: Result, starts: Sequence[Started], installed: Installed | None) -> None:
    """Add figures and acceptance lines."""
    steps = ("environment_s", "install_s", "ready_s", "answer_s", "disk_mb")
    for step in steps:
        value = None if installed is None else round(getattr(installed, step), 2)
        result.figures[f"installation, {step}"] = value
    result.figures["gateway, start, s"] = spread([each.ready_s for each in starts])
    result.figures["gateway, peak memory, MB"] = spread([each.peak_mb for each in starts])
    result.lines += [
        Line(
            name="environment, installation, start and first answer, s",
            value=None if installed is None else installed.total_s,
            bound=MOST_INSTALL_S,
        ),
        Line(
            name=f"installed modules of {', '.join(WITHOUT)}",
            value=None if installed is None else len(installed.unwanted),
            bound=0,
        ),
        Line(
            name=f"start of a gateway with {MANY_MODELS} models, s, median",
            value=statistics.median(each.ready_s for each in starts),
            bound=MOST_START_S,
        ),
        Line(
            name="peak memory of this gateway, MB, highest",
            value=max(each.peak_mb for each in starts),
            bound=MOST_MEMORY_MB,
        ),
        Line(
            name="gateways that have loaded the library of tokenizers",
            value=sum(each.tokenizers for each in starts),
            bound=0,
        ),
    ]


def installation(root: Path) -> Installed:
    """
    Install the wheel into a new environment in *root*, start a mesh and ask for one answer.

    Raises:
        SettingsError: pip fails, for example because no package index answers.
        EngineError: The mesh is not ready after `READY_S`, or does not answer.
    """
    wheel = headway_wheel(root).resolve()
    say("a new environment")
    folder = root / "environment"
    begun = time.monotonic()
    run_builder([sys.executable, "-m", "venv", str(folder)], root)
    made = time.monotonic()
    say("pip install")
    python = folder / "bin" / "python"
    pip = (str(python), "-m", "pip", *INSTALL, "--quiet", "--no-cache-dir")
    run_builder([*pip, f"{wheel}[mesh]"], root)
    installed = time.monotonic()
    say("headway up")
    url = f"http://127.0.0.1:{(port := free_port())}"
    with _mesh(folder / "bin" / "headway", port, root) as mesh:
        started = time.monotonic()
        _await_ready(url, mesh, root / "mesh" / "up.log")
        ready = time.monotonic()
        _ask(url)
        answered = time.monotonic()
    return Installed(
        environment_s=made - begun,
        install_s=installed - made,
        ready_s=ready - started,
        answer_s=answered - ready,
        disk_mb=_disk_mb(folder),
        unwanted=[name for name in WITHOUT if _has(python, name)],
    )


@contextmanager
def _mesh(headway: Path, port: int, root: Path) -> Iterator[subprocess.Popen[str]]:
    """A mesh of the new environment, in a folder of its own and without settings of this one."""
    folder = root / "mesh"
    folder.mkdir()
    environ = {name: each for name, each in os.environ.items() if not name.startswith("HEADWAY_")}
    command = (headway, *UP, "--port", str(port))
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environ, stderr=log, text=True)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(READY_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(url: str, mesh: subprocess.Popen[str], log: Path) -> None:
    give_up_at = time.monotonic() + READY_S
    while mesh.poll() is None and time.monotonic() < give_up_at:
        if _is_ready(url):
            return
        time.sleep(_POLL_S)
    raise EngineError(
        f"the installed mesh is not ready; the end of its log:\n{log.read_text()[-2000:]}"
    )


def _ask(url: str) -> None:
    """
    Ask for one chat.

    Raises:
        EngineError: The answer has no text.
    """
    asked = {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            found: Any = json.load(answer)
    except urllib.error.HTTPError as error:
        raise EngineError(f"status {error.code}: {error.read().decode()}") from error
    if not found["choices"][0]["message"]["content"]:
        raise EngineError(f"the answer has no text: {found}")


def _disk_mb(folder: Path) -> float:
    """Space that a folder takes on disk."""
    return sum(each.lstat().st_blocks * 512 for each in folder.rglob("*")) / 1e6


def _has(python: Path, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


async def _starts(root: Path, broker: str, seed: int) -> list[Started]:
    """`STARTS` starts of a gateway, after one that does not count."""
    registry = many_models(root / "models", seed)
    spec = MeshSpec(
        broker=broker,
        registry=registry,
        log_dir=root / "log",
        gateway_port=free_port(),
        log_level="warning",
        agents=(),
    )
    spec.log_dir.mkdir()
    found = []
    for number in range(1 + STARTS):
        name = f"gateway-{number}"
        began = time.monotonic()
        async with _gateway(spec, name) as (process, url):
            ready_s = time.monotonic() - began
            with urllib.request.urlopen(f"{url}/v1/models", timeout=READY_S) as answer:
                listed = len(json.load(answer)["data"])
            if listed != MANY_MODELS:
                raise EngineError(f"the gateway lists {listed} models instead of {MANY_MODELS}")
            found.append(
                Started(
                    ready_s=ready_s,
                    peak_mb=_peak_mb(process.pid),
                    tokenizers=any(
                        "/tokenizers/" in each.path
                        for each in psutil.Process(process.pid).memory_maps()
                    ),
                )
            )
        say(f"start {number} of {STARTS}")
    return found[1:]


@asynccontextmanager
async def _gateway(spec: MeshSpec, name: str) -> AsyncIterator[tuple[MeshProcess, str]]:
    """
    A gateway that is ready, and its URL.

    Raises:
        EngineError: The gateway has ended.
    """
    port = free_port()
    service, settings = spec.service_settings()["gateway"]
    process = MeshProcess(
        name, service=service, settings=settings | {"port": port}, directory=spec.log_dir
    )
    url = f"http://127.0.0.1:{port}"
    await process.start()
    try:
        while not await asyncio.to_thread(_is_ready, url):
            if not process.running:
                raise EngineError(f"the gateway has ended:\n{process.last_lines()}")
            await asyncio.sleep(_POLL_S)
        yield process, url
    finally:
        await process.stop()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=READY_S):
            return True
    except OSError:
        return False


def _peak_mb(pid: int) -> float:
    """Highest resident memory of a process so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise EngineError("this system does not report the peak memory of a process")


def many_models(folder: Path, seed: int) -> Path:
    """
    Write models without weights, each with a tokenizer of `VOCABULARY` entries, and their registry.

    Returns:
        The registry's file.
    """
    entries = []
    for number in range(MANY_MODELS):
        name = ModelName(f"model-{number}")
        directory = folder / name
        directory.mkdir(parents=True)
        config = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY}
        (directory / "config.json").write_bytes(msgspec.json.encode(config))
        tokenizer = _tokenizer(f"{seed}-{number}")
        (directory / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
        entries.append(
            ModelEntry(
                name=name,
                path=str(directory),
                architecture="LlamaForCausalLM",
                max_model_len=4096,
                eos_token_ids=(0,),
            )
        )
    registry = folder / "registry.json"
    write_registry(registry, entries)
    return registry


def _tokenizer(prefix: str) -> dict[str, object]:
    """Content of a `tokenizer.json` that splits texts at spaces, with words of its own."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"{prefix}-{word}": word for word in range(VOCABULARY)},
            "unk_token": f"{prefix}-0",
        },
    }
