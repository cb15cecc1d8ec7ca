"""Settings of the store, the same for all services that use it."""

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.contracts.base import NonEmpty

PositiveS = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
DAY_S = 86400.0
RESPONSE = "response"
"""Purpose of stored responses."""
BATCH_RECORD = "batch_record"
"""Purpose of the records of batches that have ended."""
DEFAULT_RETENTION_S = {
    "batch": 30 * DAY_S,
    "batch_output": 30 * DAY_S,
    RESPONSE: 30 * DAY_S,
    BATCH_RECORD: 90 * DAY_S,
}
"""
Files of batches and responses expire as in OpenAI's API; other files are kept until they are
deleted. Records of batches outlive the files, so that counts and ends can be looked up.
"""


class FileLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the files of one tenant may take."""

    max_bytes: Count = 16 * 2**30
    max_files: Count = 10_000


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Location and limits of the store; without `data_dir` and `url` the process has no store."""

    data_dir: NonEmpty | None = None
    """Directory of the default database and of file bodies."""
    url: NonEmpty | None = None
    """
    Database: `postgresql://user:password@host/name`, or `sqlite:///path/store.db` on one host.
    Default: `store.db` in `data_dir`.
    """
    files: NonEmpty | None = None
    """
    Place of file bodies: any fsspec URL, e.g. `s3://bucket/headway`. Gateways on several hosts need
    a place that all of them reach. Default: `files` in `data_dir`.
    """
    timeout_s: PositiveS = 3.0
    """Time limit of one transaction, and of one block of a file body times ten."""
    max_file_bytes: Count = 512 * 2**20
    """Maximum size of one file."""
    max_uploads: Annotated[int, Meta(ge=1)] = 32
    """Maximum number of uploads in progress at one gateway; further uploads get status 503."""
    upload_timeout_s: PositiveS = 3600.0
    """Time limit of one upload."""
    limits: FileLimits = FileLimits()
    """Limits of the files of each tenant."""
    tenant_limits: dict[str, FileLimits] = {}
    """Tenant -> its limits, instead of `limits`."""
    retention_s: dict[str, PositiveS] = msgspec.field(
        default_factory=lambda: dict(DEFAULT_RETENTION_S)
    )
    """
    Purpose -> time after which a new file expires at the latest; `response` is the purpose of
    stored responses, and `batch_record` that of batches, whose time counts from their end.
    """
    tenant_retention_s: dict[str, dict[str, PositiveS]] = {}
    """Tenant -> purpose -> time, instead of `retention_s`."""
    finals_kept_s: PositiveS = DAY_S
    """
    Time for which the final of a request with an id of its own is kept: until then, a repeat of the
    id gets it.
    """
    documents_kept_s: PositiveS = 3600.0
    """
    Time for which API keys from the store (`keys_file=store:`) are valid while the database is
    away; then requests with keys get status 503.
    """
    retention_period_s: PositiveS = 30.0
    """Period in which expired files, requests, responses and batches are deleted."""
    sweep_period_s: PositiveS = 3600.0
    """Period in which bodies without a file, and files without a body, are searched for."""
    orphan_grace_s: PositiveS = DAY_S
    """
    Age below which neither a body without a file nor the body of a broken upload is deleted; at
    least twice `upload_timeout_s`.
    """

    memory_mesh: str | None = None
    """
    Mesh with a broker in memory that uses the store; `headway up --broker embedded` sets it. What
    is open when the mesh is gone runs again or fails.
    """

    def limits_of(self, tenant: str) -> FileLimits:
        """Limits of the files of *tenant*."""
        return self.tenant_limits.get(tenant, self.limits)

    def retention_of(self, tenant: str, purpose: str) -> float | None:
        """Longest life of a new file or response in seconds; None without a limit."""
        own = self.tenant_retention_s.get(tenant, {})
        return own.get(purpose, self.retention_s.get(purpose))
