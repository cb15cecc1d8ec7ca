"""Runs migrations on the connection that `shared.store.migrating` gives; loaded by Alembic."""

from alembic import context

from shared.store.schema import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    # SQLite changes tables by making them again.
    render_as_batch=connection.dialect.name == "sqlite",
)
# All revisions in the transaction of the connection: a migration happens as a whole or not at all.
context.run_migrations()
