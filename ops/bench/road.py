"""
How much code of the project one streamed chat passes, in all processes.

A mesh with one vLLM engine streams an answer. Every process records with coverage.py which
statements it runs from the sending of the request to the last byte of its answer, and before in
seconds without a request. Statements that also run without a request are left out of the second
pair of figures, which has what the request alone needs.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx
import msgspec
import psutil
from coverage.parser import PythonParser

from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.environment import broker_for
from ops.ports import free_port
from services.mesh.processes import ProcessMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.contracts.errors import SettingsError
from shared.models.tiny import TINY_MODELS, make_tiny_models

MODEL = "tiny-llama"
HOOK = Path(__file__).parent / "road_hook"
SIGNAL = signal.SIGRTMIN + 5
IDLE, REQUEST, AFTER, REPORT = "idle", "request", "after", "report"
SHARE = 0.6
"""Bound of files and statements, as a share of those at the commit c13809c5."""
BEFORE_FILES, BEFORE_STATEMENTS = 229, 3842
IDLE_S = 5.0
"""Time without a request, in which all periodic work comes."""
SETTLED_S, REPORT_S = 0.3, 60.0
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello there"}],
    "max_tokens": 24,
    "temperature": 0,
    "stream": True,
}
Lines = Mapping[str, set[int]]
"""File -> lines."""


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run is the same."""
    result = Result(name="road", seed=seed, quick=quick)
    with broker_for(broker) as (url, line), tempfile.TemporaryDirectory() as directory:
        if url == EMBEDDED:
            raise SettingsError(f"this benchmark needs RabbitMQ; {line}")
        root = Path(directory)
        os.environ["HEADWAY_ROAD"] = str(root)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(HOOK), os.environ.get("PYTHONPATH")))
        )
        spec = MeshSpec(
            broker=url,
            registry=make_tiny_models(root / "models", models={MODEL: TINY_MODELS[MODEL]}),
            log_dir=root / "log",
            gateway_port=free_port(),
            log_level="warning",
            agents=(AgentSpec(instance_id="a", engine="vllm", settings={"initial_model": MODEL}),),
        )
        async with ProcessMesh(spec) as mesh:
            found = await _recorded(mesh, root)
    idle, asked = (_union(each.get(part, {}) for each in found) for part in (IDLE, REQUEST))
    own = {file: lines - idle.get(file, set()) for file, lines in asked.items()}
    own = {file: lines for file, lines in own.items() if lines}
    files, statements = len(asked), _num_statements(asked)
    result.figures |= {
        "processes": len(found),
        "files": files,
        "statements": statements,
        "lines of these files": sum(len(Path(file).read_bytes().splitlines()) for file in asked),
        "files with statements of the request alone": len(own),
        "statements of the request alone": _num_statements(own),
        "files by package": _by_package(asked),
    }
    result.lines += [
        Line(name="files, over those at c13809c5", value=files / BEFORE_FILES, bound=SHARE),
        Line(
            name="statements, over those at c13809c5",
            value=statements / BEFORE_STATEMENTS,
            bound=SHARE,
        ),
    ]
    return result


async def _recorded(mesh: ProcessMesh, root: Path) -> list[dict[str, Lines]]:
    """What each process has recorded, by the part of the measurement."""
    async with httpx.AsyncClient(base_url=mesh.spec.gateway_url, timeout=120.0) as client:
        for _ in range(2):  # caches, grammars, connections, late imports
            length_s = await _streamed(client)
        pids = _recording([each.pid for each in mesh.processes.values()])
        say(f"{len(pids)} processes record; an answer takes {length_s:.2f} s")
        await _begin(IDLE, pids, root)
        await asyncio.sleep(IDLE_S)
        await _begin(REQUEST, pids, root)
        await _streamed(client)
        await _begin(AFTER, pids, root)
        await _begin(REPORT, pids, root)
        files = [root / f"{pid}.json" for pid in pids]
        give_up_at = time.monotonic() + REPORT_S
        while not all(file.exists() for file in files) and time.monotonic() < give_up_at:
            await asyncio.sleep(0.1)
    return [
        {
            part: {name: set(lines) for name, lines in by_file.items() if lines}
            for part, by_file in msgspec.json.decode(file.read_bytes()).items()
        }
        for file in files
    ]


async def _streamed(client: httpx.AsyncClient) -> float:
    """Stream an answer; return the time to its last byte."""
    began_at = time.monotonic()
    async with client.stream("POST", "/v1/chat/completions", json=BODY) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_bytes():
            pass
    return time.monotonic() - began_at


async def _begin(part: str, pids: Iterable[int], root: Path) -> None:
    (root / "part").write_text(part)
    for pid in pids:
        os.kill(pid, SIGNAL)
    await asyncio.sleep(SETTLED_S)


def _recording(pids: Iterable[int]) -> list[int]:
    """Those of the processes *pids* and of their descendants that handle the signal."""
    trees = ([root, *root.children(recursive=True)] for root in map(psutil.Process, pids))
    return sorted({each.pid for tree in trees for each in tree if _handles(each.pid)})


def _handles(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _union(recorded: Iterable[Lines]) -> dict[str, set[int]]:
    found: defaultdict[str, set[int]] = defaultdict(set)
    for each in recorded:
        for file, lines in each.items():
            found[file] |= lines
    return dict(found)


def _num_statements(found: Lines) -> int:
    number = 0
    for file, lines in found.items():
        parser = PythonParser(filename=file)
        parser.parse_source()
        number += len(parser.translate_lines(lines) & parser.statements)
    return number


def _by_package(found: Iterable[str]) -> dict[str, int]:
    root = Path(__file__).parents[2]
    numbers: defaultdict[str, int] = defaultdict(int)
    for file in found:
        numbers[".".join(Path(file).relative_to(root).parts[:2])] += 1
    return dict(sorted(numbers.items()))
