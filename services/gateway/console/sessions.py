"""Browsers that have opened the console by its link."""

import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

from shared.contracts.errors import ContractError

COOKIE = "headway-console"


class Sessions:
    """
    Exchanges the token of the link for a cookie, once.

    The cookie depends on the token alone, so that it outlives a restart of the gateway, and opens
    the consoles of all gateways with the token.

    Args:
        token: Secret of the link; without one, only keys open the console.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._is_used = False
        self._session = (
            None if token is None else hmac.digest(token.encode(), b"console", "sha256").hex()
        )
        """Value of the cookie."""

    def open(self, token: str) -> str:
        """
        Return the value of the cookie for the browser that sends the link's token.

        Raises:
            ContractError: The token is wrong or was used before.
        """
        is_right = self._token is not None and _equal(token, self._token)
        if not is_right or self._is_used or self._session is None:
            raise ContractError(
                "this link is not valid: it works once after each start "
                "of the gateway; an API key with the scope operator opens the console too",
                code="link_not_valid",
                param="token",
                status=403,
            )
        self._is_used = True
        return self._session

    def has(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request comes from a browser that has opened the link."""
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return (
            self._session is not None and cookie is not None and _equal(cookie.value, self._session)
        )


def _equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())
