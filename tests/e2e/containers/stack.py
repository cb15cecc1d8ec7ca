"""The compose file of a release, run with the images of the version."""

import asyncio
import json
import os
import resource
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp

from ops.clients.packing import ROOT, version
from ops.ports import free_ports
from ops.release.archives import compose_archive
from shared.client.client import Client, connect
from tests.requirements import absent

MODEL = "tiny-llama"
PORTS = ("HEADWAY_PORT", "HEADWAY_AMQP_PORT", "HEADWAY_RABBITMQ_PORT")
NUM_FILES = 65536
"""Limit of open files that the compose file asks for."""
STEP_S = 240.0


def require_engine() -> None:
    """Skip the test if no container engine with compose and BuildKit answers."""
    for command in (
        ["docker", "info"],
        ["docker", "compose", "version"],
        ["docker", "buildx", "ls"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            absent(f"{' '.join(command)}: {error}", "docker")
        if done.returncode:
            absent(f"{' '.join(command)} failed: {done.stderr.decode()[:200]}", "docker")


def image_bytes(name: str) -> int | None:
    """Size of an image on this machine; None if it is not there."""
    done = subprocess.run(
        ["docker", "image", "inspect", "--format", "{{.Size}}", name],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode else int(done.stdout)


class Stack:
    """
    The mesh of an unpacked compose archive, with a project name and ports of its own.

    Args:
        directory: Folder for the archive.
        variables: Variables of the compose file.
    """

    def __init__(self, directory: Path, variables: Mapping[str, str] | None = None) -> None:
        with tarfile.open(compose_archive(directory)) as archive:
            archive.extractall(directory, filter="data")
        self.folder = directory / f"headway-compose-{version()}"
        assert ROOT not in self.folder.parents
        self.project = f"headway-test-{uuid4().hex[:8]}"
        ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self.url = f"http://127.0.0.1:{ports['HEADWAY_PORT']}"
        self.amqp_url = f"amqp://producer:producer@127.0.0.1:{ports['HEADWAY_AMQP_PORT']}/"
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        allowed = NUM_FILES if most == resource.RLIM_INFINITY else min(NUM_FILES, most)
        self._environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            **{name: each for name, each in os.environ.items() if name.startswith("DOCKER_")},
            **ports,
            "HEADWAY_NOFILE": str(allowed),
            **(variables or {}),
        }

    def compose(self, *arguments: str, timeout_s: float = STEP_S) -> str:
        """Run `docker compose`; return its output."""
        done = subprocess.run(
            ["docker", "compose", "--project-name", self.project, *arguments],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    async def run(self, *arguments: str) -> str:
        """Run `docker compose` beside other tasks."""
        return await asyncio.to_thread(self.compose, *arguments)

    def inspected(self) -> dict[str, dict[str, Any]]:
        """State of every container of the project, by its name without the project's."""
        ids = self.compose("ps", "--all", "--quiet").split()
        done = subprocess.run(
            ["docker", "inspect", *ids], capture_output=True, text=True, check=True
        )
        return {
            each["Name"].removeprefix(f"/{self.project}-"): each for each in json.loads(done.stdout)
        }

    def join(self, other: "Stack", service: str, alias: str) -> None:
        """Give a service of *other* the name *alias* in the network of this project."""
        network = f"{self.project}_default"
        container = f"{other.project}-{service}-1"
        subprocess.run(
            ["docker", "network", "connect", "--alias", alias, network, container], check=True
        )

    def leave(self, other: "Stack", service: str) -> None:
        """Undo `join`."""
        network = f"{self.project}_default"
        container = f"{other.project}-{service}-1"
        subprocess.run(["docker", "network", "disconnect", network, container], check=False)

    def close(self) -> None:
        """Remove containers, volumes and networks of the project."""
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "5")

    async def first_tokens(self, model: str = MODEL) -> tuple[float, float]:
        """Wait for a first token over HTTP, then for one over AMQP; return the times of both."""
        began = time.monotonic()
        while not (outcome := await self.ask(model, max_tokens=1)).startswith("ok"):
            assert time.monotonic() - began < STEP_S, outcome
            await asyncio.sleep(0.2)
        over_http = time.monotonic()
        async with self.client() as client:
            answer = await client.submit(model=model, prompt="hello", max_tokens=2)
            async for _ in answer.stream():
                break
            over_amqp = time.monotonic()
            await answer.wait(STEP_S)
        return over_http, over_amqp

    async def ask(self, model: str = MODEL, **fields: Any) -> str:
        """
        Ask over HTTP, with other *fields* of the body; return `ok` and the text, or the reason of
        the failure.
        """
        body = {"model": model, "prompt": "Why is the sky blue?", **fields}
        timeout = aiohttp.ClientTimeout(total=STEP_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{self.url}/v1/completions", json=body) as response,
            ):
                if response.status != 200:
                    return f"status {response.status}: {await response.text()}"
                return f"ok {(await response.json())['choices'][0]['text']}"
        except aiohttp.ClientError as error:
            return f"connection: {error!r}"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """The public client, as the user `producer`."""
        async with connect(self.amqp_url, name="containers", give_up_after_s=STEP_S) as client:
            yield client

    async def healthy(self, service: str, number: int) -> None:
        """Wait until *number* containers of a service are healthy."""
        async with asyncio.timeout(STEP_S):
            while True:
                listed = await self.run("ps", "--format", "{{.Health}}", service)
                if listed.split() == ["healthy"] * number:
                    return
                await asyncio.sleep(0.5)
