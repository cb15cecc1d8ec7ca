"""Sources of settings, and values that are refused."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.agent.backends.settings import EngineSettings, RemoteSettings
from services.agent.settings import Settings as AgentSettings
from services.gateway.settings import Settings as GatewaySettings
from services.planner.settings import Settings as PlannerSettings
from shared.contracts.errors import SettingsError
from shared.runtime.settings import ServiceSettings, converted, load, load_group, masked, masked_url
from shared.store.settings import StoreSettings


def planner(
    *,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
    overrides: dict[str, str] | None = None,
) -> PlannerSettings:
    return load(
        PlannerSettings, service="planner", environ=environ or {}, file=file, overrides=overrides
    )


def written(directory: Path, values: dict[str, Any]) -> Path:
    file = directory / "settings.json"
    file.write_bytes(msgspec.json.encode(values))
    return file


def test_defaults_apply_without_any_source():
    assert planner() == PlannerSettings()


def test_flags_override_environment_which_overrides_the_file(tmp_path: Path):
    values = {"leader": {"plan_period_s": 1.0, "settle_s": 1.0, "audit_period_s": 1.0}}
    environ = {
        "HEADWAY_PLANNER_LEADER__PLAN_PERIOD_S": "2.0",
        "HEADWAY_PLANNER_LEADER__SETTLE_S": "2.0",
    }
    leader = planner(
        environ=environ,
        file=written(tmp_path, values),
        overrides={"leader.plan_period_s": "3.0"},
    ).leader
    assert (leader.plan_period_s, leader.settle_s, leader.audit_period_s) == (3.0, 2.0, 1.0)


@pytest.mark.parametrize("text", ["inf", "Infinity", "-inf", "nan"])
@pytest.mark.parametrize("field", ["drain_timeout_s", "leader.plan_period_s"])
def test_numbers_that_are_not_finite_are_refused_by_name(field: str, text: str):
    with pytest.raises(SettingsError, match=field):
        planner(overrides={field: text})
    with pytest.raises(SettingsError, match=field):
        planner(environ={f"HEADWAY_PLANNER_{field.replace('.', '__').upper()}": text})


def test_numbers_in_groups_and_tables_are_finite_too():
    with pytest.raises(SettingsError, match="timeout_s is inf"):
        load_group(StoreSettings, group="store", environ={"HEADWAY_STORE_TIMEOUT_S": "inf"})
    with pytest.raises(SettingsError, match=r"retention_s\.batch is inf"):
        load_group(
            StoreSettings, group="store", environ={"HEADWAY_STORE_RETENTION_S__BATCH": "inf"}
        )


@pytest.mark.parametrize("settings", [AgentSettings, GatewaySettings, PlannerSettings])
def test_no_default_is_infinite(settings: type[ServiceSettings]):
    """An infinite default could not be given."""
    needed = {"instance_id": "a"} if settings is AgentSettings else {}
    assert load(settings, service="x", environ={}, overrides=needed).drain_timeout_s


@pytest.mark.parametrize("field", ["amqp_url", "registry", "tenants"])
def test_an_empty_place_is_refused_by_name(field: str):
    with pytest.raises(SettingsError, match=f"^HEADWAY_{field.upper()}: {field} is empty"):
        planner(environ={f"HEADWAY_{field.upper()}": ""})


def test_an_empty_directory_of_the_store_is_refused_by_name():
    with pytest.raises(SettingsError, match=r"^HEADWAY_STORE_DATA_DIR: data_dir is empty"):
        load_group(StoreSettings, group="store", environ={"HEADWAY_STORE_DATA_DIR": ""})


def test_shared_variables_apply_to_all_services_unless_overridden():
    environ = {"HEADWAY_AMQP_URL": "amqp://all/", "HEADWAY_LOG_LEVEL": "debug"}
    settings = planner(environ=environ | {"HEADWAY_PLANNER_AMQP_URL": "amqp://one/"})
    assert (settings.amqp_url, settings.log_level) == ("amqp://one/", "debug")


def test_variables_of_the_store_apply_to_the_services_that_have_one():
    environ = {
        "HEADWAY_STORE_URL": "postgresql://u:secret@h/db",
        "HEADWAY_STORE_TIMEOUT_S": "1.5",
        "HEADWAY_STORE_LIMITS__MAX_FILES": "7",
        "HEADWAY_GATEWAY_STORE__TIMEOUT_S": "2.5",
    }
    gateway = load(GatewaySettings, service="gateway", environ=environ)
    group_of_planner = load_group(StoreSettings, group="store", environ=environ)
    group = load_group(StoreSettings, group="store", environ=environ, overrides={"files": "f"})

    assert gateway.store.url == group.url == "postgresql://u:secret@h/db"
    assert (gateway.store.timeout_s, group.timeout_s) == (2.5, 1.5)
    assert gateway.store.limits.max_files == group.limits.max_files == 7
    assert group.files == "f"
    assert planner(environ=environ).store == group_of_planner
    assert "secret" not in str(masked(gateway))


def test_an_unknown_variable_of_the_store_is_refused():
    environ = {"HEADWAY_STORE_URI": "x"}
    for loaded in (
        lambda: load(GatewaySettings, service="gateway", environ=environ),
        lambda: load_group(StoreSettings, group="store", environ=environ),
    ):
        with pytest.raises(SettingsError, match="unknown field `uri`"):
            loaded()


def test_settings_of_other_services_are_ignored():
    environ = {"HEADWAY_AGENT_INSTANCE_ID": "x", "HEADWAY_PLANNERS_X": "1", "PATH": "/"}
    assert planner(environ=environ) == PlannerSettings()


def test_lists_and_objects_are_given_as_json():
    settings = planner(
        environ={"HEADWAY_PLANNER_ROLES": '["leader"]'},
        overrides={"grouper": '{"rest_prefetch": 7}', "grouper.trusted_users": '["a", "b"]'},
    )
    assert settings.roles == ("leader",)
    assert (settings.grouper.rest_prefetch, settings.grouper.trusted_users) == (7, ("a", "b"))


def test_fields_nest_three_levels_deep():
    settings = load(
        AgentSettings,
        service="agent",
        environ={
            "HEADWAY_AGENT_INSTANCE_ID": "i1",
            "HEADWAY_AGENT_ENGINE__SIMULATED__TIME_SCALE": "0.5",
        },
        overrides={
            "engine.simulated.latency.constant_s": "0.1",
            "engine.simulated.latency.linear_s": "0",
        },
    )
    assert settings.engine.simulated.time_scale == 0.5
    assert settings.engine.simulated.latency.constant_s == 0.1


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"nonsense": "1"}, "nonsense"),
        ({"leader.nonsense": "1"}, "nonsense"),
        ({"leader.plan_period_s": "soon"}, "leader.plan_period_s"),
        ({"leader.plan_period_s": "-1"}, "leader.plan_period_s"),
        ({"roles": '["king"]'}, "roles"),
        ({"log_level": "loud"}, "log_level"),
        ({"amqp_url": "y", "amqp_url.host": "x"}, "amqp_url"),
    ],
)
def test_invalid_values_are_refused_by_name(overrides: dict[str, str], named: str):
    with pytest.raises(SettingsError, match=named):
        planner(overrides=overrides)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HEADWAY_PLANNER_LEADER__PLAN_PEROD_S", "1"),
        ("HEADWAY_PLANNER_LEADER__PLAN_PERIOD_S", "soon"),
        ("HEADWAY_PLANNER_ROLES", '["king"]'),
        ("HEADWAY_PLANNER_LEADER", '{"plan_perod_s": 1}'),
        ("HEADWAY_LOG_LEVEL", "loud"),
        ("HEADWAY_STORE_LIMITS__MAX", "1"),
    ],
)
def test_an_invalid_variable_is_refused_by_name(variable: str, value: str):
    with pytest.raises(SettingsError, match=rf"^{variable}: .* \(settings of planner"):
        planner(environ={variable: value, "HEADWAY_PLANNER_LEADER__SETTLE_S": "1"})


def test_an_invalid_flag_is_named_instead_of_the_variable_that_it_overrides():
    with pytest.raises(SettingsError, match=r"^--set leader\.settle_s: "):
        planner(
            environ={"HEADWAY_PLANNER_LEADER__SETTLE_S": "1"},
            overrides={"leader.settle_s": "soon"},
        )


def test_values_of_the_caller_are_those_of_a_file_and_stay_as_they_are():
    values = {"log_level": "debug", "leader": {"settle_s": 1.0, "plan_period_s": 1.0}}
    given = deepcopy(values)
    settings = converted(
        PlannerSettings,
        service="planner",
        environ={"HEADWAY_LOG_LEVEL": "error", "HEADWAY_PLANNER_LEADER__SETTLE_S": "2"},
        values=given,
    )
    leader = settings.leader
    assert (settings.log_level, leader.settle_s, leader.plan_period_s) == ("error", 2.0, 1.0)
    assert given == values


def test_missing_required_fields_are_named():
    with pytest.raises(SettingsError, match="instance_id"):
        load(AgentSettings, service="agent", environ={})


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"registry": "\xff"}'])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes):
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"broken\.json"):
        planner(file=file)


def test_a_missing_file_is_refused_by_name(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"absent\.json"):
        planner(file=tmp_path / "absent.json")


def test_an_unknown_key_of_a_file_is_refused_by_name(tmp_path: Path):
    with pytest.raises(SettingsError, match="surprise"):
        planner(file=written(tmp_path, {"surprise": 1}))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://user:secret@host:5672/mesh", "amqp://***@host:5672/mesh"),
        ("amqps://user:s@cret@host/", "amqps://***@host/"),
        ("amqp://host/", "amqp://host/"),
    ],
)
def test_credentials_in_a_url_are_masked(url: str, shown: str):
    assert masked(ServiceSettings(amqp_url=url))["amqp_url"] == shown
    assert masked_url(url) == shown


def test_tenant_keys_are_masked():
    settings = load(
        GatewaySettings, service="gateway", environ={}, overrides={"api_keys": '{"sesame": "acme"}'}
    )
    assert "sesame" not in str(masked(settings))


def test_keys_inside_other_settings_are_masked():
    remote = RemoteSettings(url="http://a", api_key="sesame")
    settings = AgentSettings(instance_id="a", engine=EngineSettings(remote=remote))

    assert masked(settings)["engine"]["remote"]["api_key"] == "***"
    assert masked(settings)["engine"]["remote"]["url"] == "http://a"
