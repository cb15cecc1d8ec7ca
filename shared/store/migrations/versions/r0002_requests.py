"""Requests whose ids mean something, and the reply queues that wait for their finals."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ID = sa.String().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "requests",
        sa.Column("tenant", ID, nullable=False),
        sa.Column("id", ID, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("is_asked", sa.Boolean, nullable=False),
        sa.Column("endpoint", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("claimed_by", sa.Text),
        sa.Column("claimed_until", sa.Double),
        sa.Column("grouped_at", sa.Double),
        sa.Column("lane", sa.Text),
        sa.Column("expected_at", sa.Double),
        sa.Column("instance_id", sa.Text),
        sa.Column("started_at", sa.Double),
        sa.Column("runs", sa.Integer, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("outcome", sa.Text),
        sa.Column("final", sa.LargeBinary),
        sa.Column("kept_s", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "id", name="pk_requests"),
    )
    op.create_index("ix_requests_expires_at", "requests", ["expires_at"])
    op.create_table(
        "waiters",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("request_id", ID, nullable=False),
        sa.Column("reply_to", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_waiters"),
    )
    op.create_index("ix_waiters_tenant_request_id", "waiters", ["tenant", "request_id"])


def downgrade() -> None:
    op.drop_table("waiters")
    op.drop_table("requests")
