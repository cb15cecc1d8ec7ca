"""The servers that an address stands for."""

from pathlib import Path

import pytest

from services.agent.attached.endpoints import endpoints_of, name_of
from services.agent.backends.settings import RemoteSettings
from shared.contracts.errors import EngineError, SettingsError


async def addresses(url: str, **fields: str) -> list[str]:
    return [each.url for each in await endpoints_of(RemoteSettings(url=url, **fields)).now()]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost:8000", "https://[::1]", "http://10.0.0.7/v1"]
)
async def test_an_address_is_one_server(url: str) -> None:
    assert await addresses(url) == [url]


async def test_several_addresses_are_servers_with_spaces_between_them() -> None:
    assert await addresses("http://127.0.0.1:1 http://10.0.0.7") == [
        "http://127.0.0.1:1",
        "http://10.0.0.7",
    ]
    for url in ("", "http://127.0.0.1:1 http://name:2"):
        with pytest.raises(SettingsError):
            endpoints_of(RemoteSettings(url=url))


async def test_each_address_of_a_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("models.example", 8000)
        found = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
        return [(2, 1, 6, "", (address, port)) for address in found]

    monkeypatch.setattr("socket.getaddrinfo", lambda host, port, *_args, **_: resolve(host, port))
    servers = await endpoints_of(RemoteSettings(url="http://models.example:8000/v1")).now()

    assert [each.url for each in servers] == [
        "http://10.0.0.1:8000/v1",
        "http://10.0.0.2:8000/v1",
        "http://[fd00::1]:8000/v1",
    ]
    assert {each.host for each in servers} == {"models.example:8000"}


async def test_name_that_cannot_be_resolved_is_an_error_for_now() -> None:
    with pytest.raises(EngineError, match=r"'nothing\.invalid' cannot be resolved"):
        await addresses("http://nothing.invalid:1")


async def test_file_has_one_address_per_line_and_may_change(tmp_path: Path) -> None:
    path = tmp_path / "endpoints"
    path.write_text("# servers\nhttp://a:1\n\n  http://b:2  # spare\nhttp://a:1\n")
    endpoints = endpoints_of(RemoteSettings(url=f"file:{path}"))
    before = [each.url for each in await endpoints.now()]
    path.write_text("http://c:3\n")
    after = [each.url for each in await endpoints.now()]

    assert (before, after) == (["http://a:1", "http://b:2"], ["http://c:3"])


async def test_wrong_line_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "endpoints"
    path.write_text("http://a:1\nb:2\n")
    with pytest.raises(EngineError, match=r"address 2 of .*endpoints"):
        await addresses(f"file:{path}")
    with pytest.raises(EngineError, match="cannot read the endpoints"):
        await addresses(f"file:{tmp_path / 'absent'}")


async def test_router_is_one_server_whose_metrics_are_of_others() -> None:
    (server,) = await endpoints_of(RemoteSettings(url="router+http://router.example")).now()

    assert (server.url, server.shared_address) == ("http://router.example", True)


@pytest.mark.parametrize("url", ["", "models:8000", "ftp://a", "http://", "http://a:x", "router+a"])
def test_address_without_scheme_and_host_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"engine\.remote\.url"):
        endpoints_of(RemoteSettings(url=url))


def test_credentials_do_not_belong_into_an_address() -> None:
    with pytest.raises(SettingsError, match=r"set engine\.remote\.api_key") as refused:
        endpoints_of(RemoteSettings(url="http://me:secret@a"))

    assert "secret" not in str(refused.value)


def test_names_of_servers_fit_into_names_of_instances() -> None:
    names = [
        name_of(RemoteSettings(url=url))
        for url in ("http://10.0.0.1:8000", "https://a.example", "http://[fd00::1]:1")
    ]

    assert names == ["10-0-0-1-8000", "a-example-443", "fd00--1-1"]
