"""Error of a request."""

from shared.contracts.errors import MeshError
from shared.contracts.requests import ErrorInfo


class RequestError(MeshError):
    """
    The mesh has answered with an error: a request has ended without its whole answer, or a question
    about a request cannot be answered.

    Args:
        error: The error; `code` is stable, `message` is for humans, `param` names the field,
            `status` is the equivalent HTTP status, `retry_after_s` says when to try again.
    """

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error
        self.code = error.code
        self.status = error.status
