"""Files and leases."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    info = op.create_table(
        "schema_info",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("min_reader", sa.Integer, nullable=False),
        sa.Column("files_marker", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_schema_info"),
        sa.CheckConstraint("id = 1", name=op.f("ck_schema_info_one_row")),
    )
    op.bulk_insert(info, [{"id": 1, "min_reader": 1}])
    op.create_table(
        "leases",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "files",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_tenant_id", "files", ["tenant", "id"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])


def downgrade() -> None:
    op.drop_table("files")
    op.drop_table("leases")
    op.drop_table("schema_info")
