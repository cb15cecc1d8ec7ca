"""Options of `headway up` replace variables of the services."""

from pathlib import Path

from services.mesh.verbs.cli_up import UpOptions, drop_replaced

VARIABLES = {
    "HEADWAY_REGISTRY": "r.json",
    "HEADWAY_AMQP_URL": "amqp://other",
    "HEADWAY_GATEWAY_PORT": "9",
    "HEADWAY_GATEWAY_KEYS_FILE": "keys.json",
    "HEADWAY_PLANNER_TENANTS": "tenants.json",
    "HEADWAY_STORE_DATA_DIR": "data",
    "HEADWAY_GATEWAY_CORS_ORIGINS": '["*"]',
}


def dropped(options: UpOptions) -> set[str]:
    environ = dict(VARIABLES)
    drop_replaced(options, environ)
    return VARIABLES.keys() - environ.keys()


def test_without_options_only_the_port_is_replaced():
    assert dropped(UpOptions()) == {"HEADWAY_GATEWAY_PORT"}


def test_given_options_replace_their_variables():
    options = UpOptions(
        models=("m",),
        broker="embedded",
        keys=Path("k"),
        tenants=Path("t"),
        data_dir=Path("d"),
    )
    assert dropped(options) == VARIABLES.keys() - {"HEADWAY_GATEWAY_CORS_ORIGINS"}
    assert "HEADWAY_REGISTRY" in dropped(UpOptions(registry=Path("r")))
