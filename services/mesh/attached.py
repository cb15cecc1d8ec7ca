"""Servers that others run, as models and agents of a mesh."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.agent.attached.endpoints import endpoints_of, is_fixed
from services.agent.backends.remote.server import Description, ServedModel, Server
from services.agent.backends.settings import RemoteSettings
from services.mesh.spec import AgentSpec
from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry

DEFAULT_MODEL_LEN = 32_768
"""Length of a model's context if its server does not report it; the server has the real limit."""
API_KEY = "HEADWAY_ATTACH_API_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """One `--attach`."""

    url: str
    name: str | None = None
    """Name of the model in the mesh; None: its name at the server."""
    served: str | None = None
    """Name of the model at the server; None: the only one that the server lists."""


def target_of(text: str) -> Target:
    """
    The target in `[NAME=]URL[#SERVED]`.

    Raises:
        SettingsError: It has no address of a server.
    """
    before, equals, after = text.partition("=")
    is_named = bool(equals) and ":" not in before
    url, _, served = (after if is_named else text).partition("#")
    target = Target(url, before if is_named else None, served or None)
    endpoints_of(RemoteSettings(url=target.url))
    return target


async def attached(
    texts: Sequence[str],
    *,
    known: ModelRegistry | None,
    api_key: str | None,
) -> tuple[list[ModelEntry], list[AgentSpec]]:
    """
    Models and agents for the servers that are to be attached.

    Servers of one model are its instances. Those with a fixed address share an agent, which costs
    less than a process for each.

    Args:
        texts: Values of `--attach`.
        known: The registry of the user, whose models the servers may serve.
        api_key: Key for all servers.

    Raises:
        SettingsError: An address is wrong, or no server of a target without a known model answers.
    """
    entries: dict[ModelName, ModelEntry] = {}
    agents: list[AgentSpec] = []
    remotes: dict[tuple[ModelName, str | None, int | None], dict[str, object]] = {}
    """Model, its name at the server, and number of a target with its own agent -> its settings."""
    for number, text in enumerate(texts):
        target = target_of(text)
        settings = RemoteSettings(url=target.url, api_key=api_key)
        entry, model = await _entry_of(target, settings, known)
        if known is None or entry.name not in known.bases:
            # A request may go to any server of its model, so that it must fit into each.
            earlier = entries.get(entry.name, entry)
            entries[entry.name] = min(earlier, entry, key=lambda each: each.max_model_len)
        of_agent = (entry.name, model, None if is_fixed(target.url) else number)
        if of_agent in remotes:
            remotes[of_agent]["url"] = f"{remotes[of_agent]['url']} {target.url}"
            continue
        remote: dict[str, object] = {"url": target.url}
        if model is not None:
            remote["model"] = model
        if api_key is not None:
            remote["api_key"] = api_key
        remotes[of_agent] = remote
        agents.append(
            AgentSpec(
                instance_id=f"attached-{number}",
                engine="remote",
                settings={"models": [entry.name], "engine": {"remote": remote}},
            )
        )
    return [*entries.values()], agents


async def _entry_of(
    target: Target, settings: RemoteSettings, known: ModelRegistry | None
) -> tuple[ModelEntry, str | None]:
    """Entry of a target's model, and the model's name at the server if it differs."""
    if known is not None and target.name in known.bases:
        return known.entry(ModelName(target.name)), target.served
    description = await _description_of(settings)
    served = description.bases if description else ()
    if target.served is not None:
        served = tuple(each for each in served if each.id == target.served)
    if target.name is None:
        if len(served) != 1:
            found = ", ".join(each.id for each in served) or "none"
            raise SettingsError(
                f"--attach {target.url}: the server lists {found} as models; say which one, as in "
                f"--attach NAME={target.url}#MODEL"
            )
        name = served[0].id
        if known is not None and name in known.bases:
            return known.entry(ModelName(name)), None
    else:
        name = target.name
    model = next((each for each in served if each.id == name), served[0] if served else None)
    entry = ModelEntry(
        name=ModelName(name),
        takes="bodies",
        max_model_len=(model.max_model_len if model else None) or DEFAULT_MODEL_LEN,
        adapters=_adapters_of(description, model),
    )
    at_server = target.served or (model.id if model is not None else name)
    return entry, None if at_server == name else at_server


def _adapters_of(description: Description | None, model: ServedModel | None) -> dict[str, str]:
    """Adapters of a model that its server lists; the server has their files."""
    if description is None or model is None:
        return {}
    return {each.id: "" for each in description.models if each.parent == model.id}


async def _description_of(settings: RemoteSettings) -> Description | None:
    """What the first server that answers says about itself; None if none answers."""
    endpoints = endpoints_of(settings)
    try:
        addresses = await endpoints.now()
    except EngineError as error:
        raise SettingsError(f"--attach {settings.url}: {error}") from error
    finally:
        await endpoints.close()
    for address in addresses:
        server = Server(address)
        try:
            return await server.describe()
        except EngineError:
            continue
        finally:
            await server.close()
    return None
