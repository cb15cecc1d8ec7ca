"""Stored responses with their events, and deliveries of webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ID = sa.String().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("is_background", sa.Boolean, nullable=False),
        sa.Column("asked", sa.LargeBinary, nullable=False),
        sa.Column("headers", sa.LargeBinary, nullable=False),
        sa.Column("previous_response_id", ID),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("expires_at", sa.Double),
        sa.Column("object", sa.LargeBinary, nullable=False),
        sa.Column("num_events", sa.BigInteger, nullable=False),
        sa.Column("runner", sa.Text),
        sa.Column("held_until", sa.Double),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_responses"),
    )
    op.create_index("ix_responses_expires_at", "responses", ["expires_at"])
    op.create_index("ix_responses_held_until", "responses", ["held_until"])
    op.create_table(
        "response_events",
        sa.Column("response_id", ID, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("response_id", "number", name="pk_response_events"),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("event_id", ID, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_at", sa.Double),
        sa.Column("outcome", sa.Text),
        sa.Column("ended_at", sa.Double),
        sa.PrimaryKeyConstraint("event_id", "url", name="pk_webhook_deliveries"),
    )
    op.create_index("ix_webhook_deliveries_next_at", "webhook_deliveries", ["next_at"])
    op.create_index("ix_webhook_deliveries_ended_at", "webhook_deliveries", ["ended_at"])


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("response_events")
    op.drop_table("responses")
