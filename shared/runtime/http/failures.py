"""Why requests of HTTP clients failed, as sentences."""

import aiohttp

_INCOMPLETE = "Response payload is not completed"


def failure_reason(error: Exception) -> str:
    """The reason of a client's error, without aiohttp's own objects."""
    match error:
        case aiohttp.ServerDisconnectedError(message=str()):
            return "the server closed the connection before it answered"
        case aiohttp.ServerDisconnectedError():
            return "the server closed the connection within the head of its answer"
        case aiohttp.ClientPayloadError() if str(error).startswith(_INCOMPLETE):
            return "the server closed the connection within its answer"
        case aiohttp.ClientResponseError():
            return f"the answer is not valid HTTP: {error.message.partition(chr(10))[0]}"
        case TimeoutError() if not str(error):
            return "no answer in time"
        case _:
            return str(error) or type(error).__name__
