"""Endpoints of packages: which paths they may have."""

from pathlib import Path
from typing import Any, cast

import pytest

from services.gateway.added import added_resources
from services.gateway.requests.application import RequestsResource
from services.gateway.state import Gateway
from shared.contracts.errors import SettingsError
from tests.unit.runtime.packages import Install, installer

GATEWAY = cast("Gateway", object())
CODE = """
from shared.contracts.tenants.keys import Scope

class Added:
    name = "added"
    routes = {{}}

    def __init__(self, gateway):
        self.root, self.scope, self.gateway = "{root}", {scope}, gateway
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    install: Install = installer(tmp_path, monkeypatch)

    def added(module: str, root: str, scope: str = "Scope.INFERENCE") -> None:
        code = CODE.format(root=root, scope=scope)
        install("headway.routes", module, f"{module}:Added", code)

    return added


def test_resources_of_packages_get_the_gateway(install: Any) -> None:
    install("added_a", "/v1/summaries")
    install("added_b", "/v1/summaries-of-others")
    resources = added_resources(GATEWAY, (RequestsResource(GATEWAY),))

    assert [each.root for each in resources] == ["/v1/summaries", "/v1/summaries-of-others"]
    assert all(cast("Any", each).gateway is GATEWAY for each in resources)


@pytest.mark.parametrize(
    ("module", "root", "message"),
    [
        ("added_c", "/v1/requests", "overlaps /v1/requests, which the gateway serves"),
        ("added_d", "/v1/requests/late", "overlaps /v1/requests, which the gateway serves"),
        ("added_e", "/v1/chat", "overlaps /v1/chat/completions, which the gateway serves"),
        ("added_f", "/metrics", "overlaps /metrics, which the gateway serves"),
        ("added_g", "summaries", "must begin with a slash"),
        ("added_h", "/summaries/", "and end without one"),
    ],
)
def test_path_that_is_taken_or_invalid_is_refused(
    install: Any, module: str, root: str, message: str
) -> None:
    install(module, root)

    with pytest.raises(SettingsError, match=message) as refused:
        added_resources(GATEWAY, (RequestsResource(GATEWAY),))
    assert f"{module!r} ({module}:Added, of package-0)" in str(refused.value)


def test_two_packages_cannot_have_one_path(install: Any) -> None:
    install("added_i", "/v1/summaries")
    install("added_j", "/v1/summaries")

    with pytest.raises(SettingsError, match=r"overlaps /v1/summaries, which .*added_i.* serves"):
        added_resources(GATEWAY, ())


def test_scope_must_be_one_of_a_key(install: Any) -> None:
    install("added_k", "/v1/summaries", "'anything'")

    with pytest.raises(SettingsError, match=r"scope 'anything' must be one of Scope\."):
        added_resources(GATEWAY, ())
