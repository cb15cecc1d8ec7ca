"""Batches of requests."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

ID = sa.String().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("input_file_id", ID, nullable=False),
        sa.Column("input_body", sa.Text, nullable=False),
        sa.Column("completion_window", sa.Text, nullable=False),
        sa.Column("slo", sa.Text),
        sa.Column("metadata", sa.Text),
        sa.Column("output_expires_s", sa.Double),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("in_progress_at", sa.Double),
        sa.Column("finalizing_at", sa.Double),
        sa.Column("cancelling_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("num_lines", sa.Integer, nullable=False),
        sa.Column("num_completed", sa.Integer, nullable=False),
        sa.Column("num_failed", sa.Integer, nullable=False),
        sa.Column("submitted_lines", sa.Integer, nullable=False),
        sa.Column("output_file_id", ID),
        sa.Column("error_file_id", ID),
        sa.Column("errors", sa.Text),
        sa.Column("lines_per_s", sa.Double),
        sa.Column("expected_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_tenant_id", "batches", ["tenant", "id"])
    op.create_index("ix_batches_status", "batches", ["status"])


def downgrade() -> None:
    op.drop_table("batches")
