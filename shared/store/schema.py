"""
Tables of the store. Times are Unix seconds as floats of double precision, as in all contracts:
SQLite has no type for times, and the same comparisons hold on both databases.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
"""Names of constraints, so that migrations can name them on both databases."""
ID = String().with_variant(Text(collation="C"), "postgresql")
"""Ids are ordered by their bytes on every database: lists follow this order."""

metadata = MetaData(naming_convention=NAMES)

schema_info = Table(
    "schema_info",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    # Oldest revision of code that can use the schema.
    Column("min_reader", Integer, nullable=False),
    # Content of the marker in the folder of file bodies; null until a process has claimed it.
    Column("files_marker", Text),
    CheckConstraint("id = 1", name="one_row"),
)

leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    # Grows with each takeover; a write with an older token is refused.
    Column("token", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
)

files = Table(
    "files",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    # `stored`, or `lost` while the body is missing.
    Column("status", Text, nullable=False),
    # Path of the body in the folder of file bodies.
    Column("body", Text, nullable=False),
    Index(None, "tenant", "id"),
    Index(None, "expires_at"),
)

requests = Table(
    "requests",
    metadata,
    Column("tenant", ID, primary_key=True),
    Column("id", ID, primary_key=True),
    # Digest of what was asked: another digest under the same id is refused.
    Column("digest", Text, nullable=False),
    # True if the row was made before the request was published, so a refusal is kept as well.
    Column("is_asked", Boolean, nullable=False),
    Column("endpoint", Text),
    Column("model", Text),
    Column("created_at", Double, nullable=False),
    # Grouper that puts the request into its queue, until this time; then another one may.
    Column("claimed_by", Text),
    Column("claimed_until", Double),
    # The request is in a queue or beyond since this time; null before.
    Column("grouped_at", Double),
    Column("lane", Text),
    # Time at which the request's service was expected to begin, when it was grouped.
    Column("expected_at", Double),
    Column("instance_id", Text),
    Column("started_at", Double),
    # Number of runs that were reported.
    Column("runs", Integer, nullable=False),
    Column("ended_at", Double),
    # `completed`, or the code of the error; null until the end.
    Column("outcome", Text),
    # The final reply as it was sent.
    Column("final", LargeBinary),
    # Time for which the final is kept.
    Column("kept_s", Double, nullable=False),
    # The row is deleted after this time.
    Column("expires_at", Double, nullable=False),
    # Mesh with a broker in memory that has the request; null for other brokers.
    Column("memory_mesh", Text),
    Index(None, "expires_at"),
)

documents = Table(
    "documents",
    metadata,
    Column("name", Text, primary_key=True),
    Column("content", LargeBinary, nullable=False),
    # Grows with each change: a change names the version that it is based on.
    Column("version", Integer, nullable=False),
    Column("changed_at", Double, nullable=False),
)

waiters = Table(
    "waiters",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", ID, nullable=False),
    Column("request_id", ID, nullable=False),
    # Reply queue that gets the final of a request that was asked again.
    Column("reply_to", Text, nullable=False),
    Index(None, "tenant", "request_id"),
)

batches = Table(
    "batches",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", ID, nullable=False),
    # Path of the input's body in the folder of file bodies.
    Column("input_body", Text, nullable=False),
    # The window as the client wrote it; `expires_at` is its end.
    Column("completion_window", Text, nullable=False),
    # Targets of lines that set none, and the client's metadata: JSON, or null.
    Column("slo", Text),
    Column("metadata", Text),
    # Life of the output files that the client requests.
    Column("output_expires_s", Double),
    Column("status", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("cancelling_at", Double),
    # Time of the last status, which says what happened: completed, failed, expired or cancelled.
    Column("ended_at", Double),
    Column("num_lines", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    # Lines before this one were published, or are invalid.
    Column("submitted_lines", Integer, nullable=False),
    Column("output_file_id", ID),
    Column("error_file_id", ID),
    # Why the batch failed: JSON, or null.
    Column("errors", Text),
    # Lines that ended in a second, and the expected end, when they were last counted.
    Column("lines_per_s", Double),
    Column("expected_at", Double),
    Index(None, "tenant", "id"),
    Index(None, "status"),
)

responses = Table(
    "responses",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant", ID, nullable=False),
    Column("model", Text, nullable=False),
    # `queued`, `in_progress`, or how the response ended.
    Column("status", Text, nullable=False),
    Column("is_background", Boolean, nullable=False),
    # The body as it was asked: earlier turns are not in it.
    Column("asked", LargeBinary, nullable=False),
    # Headers of the request that the mesh reads, a JSON object.
    Column("headers", LargeBinary, nullable=False),
    Column("previous_response_id", ID),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    # The row is invisible from this time, and deleted after it; null for no end.
    Column("expires_at", Double),
    # The response object: as it is now, without output until the end.
    Column("object", LargeBinary, nullable=False),
    # Number of its events, which are numbered from 0.
    Column("num_events", BigInteger, nullable=False),
    # Gateway that runs it, until this time; then another one may. Null after the end.
    Column("runner", Text),
    Column("held_until", Double),
    # Fencing token: grows with each takeover.
    Column("epoch", BigInteger, nullable=False),
    Index(None, "expires_at"),
    Index(None, "held_until"),
)

response_events = Table(
    "response_events",
    metadata,
    Column("response_id", ID, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("type", Text, nullable=False),
    # The event as it is sent, a JSON object.
    Column("data", LargeBinary, nullable=False),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    # The event, which has one delivery for each URL.
    Column("event_id", ID, primary_key=True),
    Column("url", Text, primary_key=True),
    Column("tenant", ID, nullable=False),
    Column("type", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
    # Number of attempts that were made.
    Column("attempts", Integer, nullable=False),
    # Time of the next attempt; null after the end.
    Column("next_at", Double),
    # `delivered`, or why the delivery ended without; before the end, the last failure.
    Column("outcome", Text),
    Column("ended_at", Double),
    Index(None, "next_at"),
    Index(None, "ended_at"),
)
