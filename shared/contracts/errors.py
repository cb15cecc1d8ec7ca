"""The error tree. What a handler raises decides what happens to the message it was given."""


class MeshError(Exception):
    """Base of every error that Headway raises on purpose."""


class ContractError(MeshError):
    """
    The sender broke the contract; the same message can never succeed.

    Args:
        message: What is wrong and what would be right, for the sender to read.
        code: Stable machine-readable word, e.g. `model_not_found`.
        param: The field at fault, if it is one field.
        status: HTTP status that says the same.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status


class TransientError(MeshError):
    """Failed for now (broker away, peer restarting); the same message may succeed later."""


class BrokerUnavailableError(TransientError):
    """The broker did not answer in time; whether the last publish arrived is unknown."""


class BrokerConflictError(MeshError):
    """A queue or exchange exists with other properties, or is another connection's."""


class BrokerAccessError(BrokerConflictError):
    """The broker's permissions forbid it, or the message claims another user."""


class QueueNotFoundError(MeshError):
    """The queue is not there."""


class CapacityError(MeshError):
    """
    Refused because of load, not because of the request.

    Args:
        message: For the sender.
        retry_after_s: When a retry is likely to be admitted.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(MeshError):
    """
    The engine could not do what was asked.

    Args:
        message: What failed.
        engine_dead: The engine process is gone and everything it ran with it.
    """

    def __init__(self, message: str, *, engine_dead: bool = False) -> None:
        super().__init__(message)
        self.engine_dead = engine_dead


class NotActiveError(EngineError):
    """The model is not the active one; the same request may run here, or elsewhere, later."""


class NoRoomError(EngineError):
    """Memory that was set aside for it is full; nothing was changed."""


class UnsupportedError(EngineError):
    """The engine backend lacks the capability that the operation needs."""


class SettingsError(MeshError):
    """A setting is unknown or out of range; start-up stops with exit code 2."""


class SchemaMismatchError(MeshError):
    """
    What was learnt elsewhere is of another schema, or of another model; it is not used.

    Args:
        field: That differs.
        expected: Its value here.
        found: Its value there.
    """

    def __init__(self, field: str, *, expected: object, found: object) -> None:
        super().__init__(f"{field} is {found!r}; here it is {expected!r}")
        self.field = field
        self.expected = expected
        self.found = found


class TooFewSamplesError(MeshError):
    """
    Too little was seen to learn from.

    Args:
        samples: That there are.
        least: That it takes.
    """

    def __init__(self, *, samples: int, least: int) -> None:
        super().__init__(
            f"{samples} samples are too few to learn from; at least {least} are needed"
        )
        self.samples = samples
        self.least = least
