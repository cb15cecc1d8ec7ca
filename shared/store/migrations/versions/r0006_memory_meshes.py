"""Meshes whose broker is in memory, at the requests that they have."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("requests", sa.Column("memory_mesh", sa.Text))


def downgrade() -> None:
    with op.batch_alter_table("requests") as requests:
        requests.drop_column("memory_mesh")
