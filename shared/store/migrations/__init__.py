"""
Migrations of the schema, oldest first; `ops/docs/store.md` has the rules for their authors.
"""

REVISIONS = (
    "shared.store.migrations.versions.r0001_files",
    "shared.store.migrations.versions.r0002_requests",
    "shared.store.migrations.versions.r0003_documents",
    "shared.store.migrations.versions.r0004_batches",
    "shared.store.migrations.versions.r0005_responses",
    "shared.store.migrations.versions.r0006_memory_meshes",
)
"""Modules of all revisions in order; the number of a revision is its place, from 1."""
HEAD = len(REVISIONS)
"""The revision that this version of Headway writes and needs."""


def revision_id(number: int) -> str:
    """Alembic's id of the revision with this number."""
    return f"{number:04}"
