"""Operators' commands as processes in the environment of a mesh."""

import asyncio
import json
import sys
from typing import Any

from services.mesh.processes import ProcessMesh


class Ran:
    """A finished command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out.strip().splitlines()[-1])

    @property
    def lines(self) -> list[Any]:
        """Output lines decoded from JSON."""
        return [json.loads(line) for line in self.out.strip().splitlines()]


async def run(mesh: ProcessMesh, module: str, *arguments: str, limit_s: float = 60.0) -> Ran:
    """Run `python -m services.<module> …` in the mesh's environment."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{module}",
        *arguments,
        env={
            "PATH": "/usr/bin:/bin",
            "HEADWAY_AMQP_URL": mesh.spec.broker,
            "HEADWAY_REGISTRY": str(mesh.spec.registry),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), limit_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Ran(process.returncode or 0, out.decode(), err.decode())
