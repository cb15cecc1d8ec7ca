"""
Tables of the store. Times are Unix seconds as floats of double precision, as in all contracts:
SQLite has no type for times, and the same comparisons hold on both databases.
"""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
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
