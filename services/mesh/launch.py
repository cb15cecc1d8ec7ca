"""Creates the mesh of a spec, for any broker."""

from services.mesh.embedded import EmbeddedMesh
from services.mesh.mesh import READY_TIMEOUT_S, Mesh
from services.mesh.processes import ProcessMesh
from services.mesh.spec import EMBEDDED, MeshSpec


def mesh_of(spec: MeshSpec, *, ready_timeout_s: float = READY_TIMEOUT_S) -> Mesh:
    """The mesh that *spec* describes; the mesh starts when its context is entered."""
    kind = EmbeddedMesh if spec.broker == EMBEDDED else ProcessMesh
    return kind(spec, ready_timeout_s=ready_timeout_s)
