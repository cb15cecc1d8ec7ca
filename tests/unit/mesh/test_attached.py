"""Servers that `headway up --attach` names."""

from pathlib import Path

import pytest

from services.mesh.attached import Target, attached, target_of
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from tests.agents.openai_server import OpenAiServer


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://a:1", Target("http://a:1")),
        ("m=http://a:1", Target("http://a:1", "m")),
        ("org/m=router+https://a", Target("router+https://a", "org/m")),
        ("http://a:1/x?y=z", Target("http://a:1/x?y=z")),
        ("m=file:/x=y", Target("file:/x=y", "m")),
        ("m=http://a:1#/models/x=1", Target("http://a:1", "m", "/models/x=1")),
    ],
)
def test_target_is_an_address_with_or_without_a_name(text: str, target: Target) -> None:
    assert target_of(text) == target


def test_target_without_an_address_is_refused() -> None:
    with pytest.raises(SettingsError, match="must be http"):
        target_of("m=a:1")


async def test_model_is_what_the_server_lists() -> None:
    server = OpenAiServer(model="org/served")
    async with server.serving() as url:
        entries, agents = await attached([url], known=None, api_key="k")
        (renamed,), (agent,) = await attached([f"mine={url}"], known=None, api_key=None)

    assert entries == [ModelEntry(name=ModelName("org/served"), takes="bodies", max_model_len=512)]
    assert agents[0].settings == {
        "models": ["org/served"],
        "engine": {"remote": {"url": url, "api_key": "k"}},
    }
    assert renamed.name == "mine"
    assert agent.settings["engine"] == {"remote": {"url": url, "model": "org/served"}}


async def test_model_of_the_registry_keeps_its_entry() -> None:
    known = ModelRegistry([ModelEntry(name=ModelName("m"), path="m", max_model_len=64)])
    async with OpenAiServer(model="m").serving() as url:
        entries, (agent,) = await attached([url], known=known, api_key=None)

    assert entries == []
    assert agent.settings["models"] == ["m"]


async def test_server_that_does_not_answer_needs_a_name() -> None:
    with pytest.raises(SettingsError, match=r"lists none as models; say which one"):
        await attached(["http://127.0.0.1:9"], known=None, api_key=None)
    entries, (agent,) = await attached(["m=http://127.0.0.1:9#x"], known=None, api_key=None)

    assert [entry.name for entry in entries] == ["m"]
    assert agent.settings["engine"]["remote"]["model"] == "x"


@pytest.mark.parametrize("order", [1, -1])
async def test_servers_of_one_model_are_its_instances(order: int) -> None:
    """The limit is that of the server that reports one; the other has a longer default."""
    async with OpenAiServer(model="m").serving() as url:
        targets = [url, "m=http://127.0.0.1:9"][::order]
        (entry,), (agent,) = await attached(targets, known=None, api_key=None)

    assert (entry.name, entry.max_model_len) == ("m", 512)
    assert agent.settings["models"] == ["m"]
    urls = agent.settings["engine"]["remote"]["url"].split()
    assert urls == [url, "http://127.0.0.1:9"][::order]


async def test_targets_of_other_kinds_have_their_own_agents(tmp_path: Path) -> None:
    fixed, file = "m=http://127.0.0.1:9", f"m=file:{tmp_path / 'servers'}"
    (tmp_path / "servers").write_text("http://127.0.0.1:8\n")
    targets = [fixed, file, f"{fixed}#x", fixed]
    _, agents = await attached(targets, known=None, api_key=None)

    assert [agent.instance_id for agent in agents] == ["attached-0", "attached-1", "attached-2"]
