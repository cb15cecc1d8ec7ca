"""Ids of the instances of attached servers."""

import re

from services.agent.attached.endpoints import name_of
from services.agent.attached.replicas import MAX_ID_CHARS, id_of_instance
from services.agent.backends.settings import RemoteSettings

POD = "headway-attached-llama-3-70b-instruct-production-6c9f7d8b5-x2k4q"


def ids_of(agent_id: str, *urls: str) -> list[str]:
    return [id_of_instance(agent_id, name_of(RemoteSettings(url=url))) for url in urls]


def test_id_is_that_of_the_agent_and_the_servers_address() -> None:
    assert ids_of("attached", "http://10.0.0.7:8000") == ["attached-10-0-0-7-8000"]


def test_servers_of_an_agent_with_a_long_id_have_different_ids() -> None:
    ids = ids_of(POD, "http://10.0.0.7:8000", "http://10.0.0.8:8000")

    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[a-z0-9-]+", each) for each in ids)
    assert all(len(each) == MAX_ID_CHARS for each in ids)
