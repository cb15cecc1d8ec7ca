"""Processes of a mesh that did not reach the broker in time are started again."""

from pathlib import Path

from services.mesh.processes import MeshProcess, ProcessMesh
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_NO_BROKER
from tests.e2e.meshes import mesh_spec


class Ended(MeshProcess):
    """A process that ended with *exit_code*, and runs after its next start."""

    def __init__(self, name: str, directory: Path, ended: int | None) -> None:
        super().__init__(name, service="gateway", settings={}, directory=directory)
        self.ended = ended
        self.num_starts = 0

    @property
    def exit_code(self) -> int | None:
        return self.ended

    async def start(self) -> None:
        self.num_starts += 1
        self.ended = None


async def test_process_without_a_broker_is_started_again_and_others_are_not(
    tmp_path: Path,
) -> None:
    mesh = ProcessMesh(mesh_spec("amqp://127.0.0.1:1/", tmp_path))
    ends = {"late": EXIT_NO_BROKER, "failed": EXIT_FAILED, "running": None}
    processes = {name: Ended(name, tmp_path, code) for name, code in ends.items()}
    mesh.processes = dict(processes)

    await mesh.retry_starts()
    await mesh.retry_starts()

    assert {name: process.num_starts for name, process in processes.items()} == {
        "late": 1,
        "failed": 0,
        "running": 0,
    }
