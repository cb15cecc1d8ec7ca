"""A mesh by its spec, whatever its broker."""

from services.mesh.embedded import EmbeddedMesh
from services.mesh.processes import ProcessMesh
from services.mesh.spec import EMBEDDED, MeshSpec

Mesh = ProcessMesh | EmbeddedMesh


def mesh_of(spec: MeshSpec, *, ready_timeout_s: float = 240.0) -> Mesh:
    """The mesh that *spec* describes, not started: enter its context to run it."""
    if spec.broker == EMBEDDED:
        return EmbeddedMesh(spec, ready_timeout_s=ready_timeout_s)
    return ProcessMesh(spec, ready_timeout_s=ready_timeout_s)
