"""Creates the mesh of a spec, for any broker."""

from services.mesh.mesh import READY_TIMEOUT_S, Mesh
from services.mesh.processes import ProcessMesh
from services.mesh.ready import Say, silent
from services.mesh.spec import EMBEDDED, MeshSpec


def mesh_of(spec: MeshSpec, *, ready_timeout_s: float = READY_TIMEOUT_S, say: Say = silent) -> Mesh:
    """The mesh that *spec* describes; the mesh starts when its context is entered."""
    if spec.broker != EMBEDDED:
        return ProcessMesh(spec, ready_timeout_s=ready_timeout_s, say=say)
    # Imported only where it is used, since it imports all services.
    from services.mesh.embedded import EmbeddedMesh  # noqa: PLC0415

    return EmbeddedMesh(spec, ready_timeout_s=ready_timeout_s, say=say)
