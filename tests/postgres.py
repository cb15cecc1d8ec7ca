"""A private PostgreSQL for tests, which skip without one."""

from ops.bench.postgres import PrivatePostgres
from shared.contracts.errors import SettingsError
from tests.requirements import absent, module


def new_postgres() -> PrivatePostgres:
    """A server that is not started; the test skips if PostgreSQL or its driver is missing."""
    module("asyncpg")
    try:
        return PrivatePostgres()
    except SettingsError as error:
        absent(str(error), "postgresql")
