"""Exceptions of Headway. The type that a handler raises decides how its message is settled."""


class MeshError(Exception):
    """Base of every exception that Headway raises on purpose."""


class ContractError(MeshError):
    """
    The sender broke the contract; the same message can never succeed.

    Args:
        message: Problem and correction, as text for the sender.
        code: Stable machine-readable word, e.g. `model_not_found`.
        param: The invalid field, if it is a single field.
        status: Equivalent HTTP status.
        response: Response of a server of others that refused the request.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        status: int = 400,
        response: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.response = response


class MessageTooLargeError(ContractError):
    """
    The broker refuses messages of this size.

    Args:
        message: Size and limit, and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, code="message_too_large", status=413)


class TransientError(MeshError):
    """A temporary failure, e.g. the broker is unreachable; the same message may succeed later."""


class ModelNotReadyError(TransientError):
    """A model is in the registry, and this process cannot serve its requests yet."""


class BrokerUnavailableError(TransientError):
    """The broker did not answer in time; the last publish may or may not have arrived."""


class QueueDownError(BrokerUnavailableError):
    """The queue is on a node of the broker that is down; it comes back with the node."""


class StoreUnavailableError(TransientError):
    """
    The store did not answer in time, or this process may not use it now.

    Inference does not depend on the store.
    """


class StoreFullError(MeshError):
    """The disk of the store is full; nothing was stored."""


class StaleLeaseError(MeshError):
    """Another process has taken over the lease; the write was refused."""


class BrokerConflictError(MeshError):
    """A queue or exchange exists with other properties, or belongs to another connection."""


class BrokerAccessError(BrokerConflictError):
    """The user lacks the permission for the operation, or the message has another user id."""


class QueueNotFoundError(MeshError):
    """The broker has no queue with the given name."""


class CapacityError(MeshError):
    """
    The request was refused because of load, not because of its content.

    Args:
        message: Text for the sender.
        retry_after_s: Time in seconds after which a retry will probably be admitted.
        status: Equivalent HTTP status: 429 for a limit of the sender, 503 for one of the service.
    """

    def __init__(self, message: str, *, retry_after_s: float, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status


class EngineError(MeshError):
    """
    The engine could not perform the requested operation.

    Args:
        message: Description of the failure.
        engine_dead: True if the engine process has died with all its runs.
    """

    def __init__(self, message: str, *, engine_dead: bool = False) -> None:
        super().__init__(message)
        self.engine_dead = engine_dead


class NotActiveError(EngineError):
    """The model is not active; the same request may run later on this or another instance."""


class ConnectionBrokenError(NotActiveError):
    """The connection of one run broke, although the server of others answers."""


class NoRoomError(EngineError):
    """The memory that is reserved for warm models is full; nothing was changed."""


class UnsupportedError(EngineError):
    """The engine backend lacks the capability that the operation needs."""


class SettingsError(MeshError):
    """A setting is unknown or out of range; start-up fails with exit code 2."""


class StoreSchemaError(SettingsError):
    """The store's schema does not fit this version of Headway; the message has the remedy."""


class SchemaMismatchError(MeshError):
    """
    Learnt data has another schema or belongs to another model, so it is not used.

    Args:
        field: The field that differs.
        expected: Value of the field in this process.
        found: Value of the field in the data.
    """

    def __init__(self, field: str, *, expected: object, found: object) -> None:
        super().__init__(f"{field} is {found!r}; expected {expected!r}")
        self.field = field
        self.expected = expected
        self.found = found

    @classmethod
    def check(cls, **fields: tuple[object, object]) -> None:
        """
        Check that the expected value of each field equals the found value.

        Raises:
            SchemaMismatchError: The values of a field differ; the message names the first such
                field.
        """
        for field, (expected, found) in fields.items():
            if expected != found:
                raise cls(field, expected=expected, found=found)


class TooFewSamplesError(MeshError):
    """
    There are too few training samples.

    Args:
        samples: Number of samples found.
        least: Number of samples required.
    """

    def __init__(self, *, samples: int, least: int) -> None:
        super().__init__(
            f"{samples} samples are too few to learn from; at least {least} are needed"
        )
        self.samples = samples
        self.least = least
