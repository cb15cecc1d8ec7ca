"""A reached limit of a tenant, as an error and as a part of answers."""

from shared.contracts.base import Seconds, Value
from shared.contracts.errors import CapacityError


class RateLimit(Value, frozen=True, kw_only=True, omit_defaults=True):
    """State of one limit per minute, for the headers `x-ratelimit-*`."""

    limit: int
    remaining: int = 0
    reset_s: Seconds = 0.0
    """Time until `remaining` is `limit` again if no request comes."""


QUOTA_SPENT = "insufficient_quota"
"""Code and type of errors about the budget of a day."""


class RateLimitedError(CapacityError):
    """
    A limit of the sender's tenant is reached.

    Args:
        message: Tenant, limit and its value, as text for the sender.
        retry_after_s: Time in seconds after which a retry may be admitted.
        code: `rate_limit_exceeded`, or `QUOTA_SPENT` for the budget of a day.
        requests: State of the limit of requests per minute, if there is one.
        tokens: State of the limit of tokens per minute, if there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        code: str,
        requests: RateLimit | None = None,
        tokens: RateLimit | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.code = code
        self.requests = requests
        self.tokens = tokens
