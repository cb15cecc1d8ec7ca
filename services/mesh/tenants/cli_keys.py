"""`headway keys`: the API keys of a file or of the store."""

import sys
from codecs import BOM_UTF8
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.table import Table

from services.mesh.tenants.key_places import edited_keys, listed_keys
from services.mesh.verbs.options import DurationText, file_of
from services.mesh.verbs.tables import print_tables
from shared.contracts.base import TenantId, UnixTime
from shared.contracts.errors import SettingsError
from shared.contracts.tenants.keys import ApiKey, Scope
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import File, JsonOption
from shared.runtime.program import commands
from shared.tenants.keys import SHORT_KEY_CHARS
from shared.tenants.policies import MAX_TENANT_CHARS
from shared.tenants.usage_questions import parse_duration

KEYS = commands(
    "keys",
    "Create, list, rotate and revoke API keys.",
    examples="""\
Gateways with the setting `keys_file` follow the file: a key that is revoked is
refused within two seconds. The file has the digests of keys only, and only its
owner can read it. The file `store:` is the store of the variables
HEADWAY_STORE_URL or HEADWAY_STORE_DATA_DIR, for gateways with
`keys_file=store:`.

examples:
  headway keys create --tenant acme --expires 90d  prints the key, only once
  headway keys rotate key-1f2e3d4c --overlap 24h   the old key ends after a day
  headway keys revoke key-1f2e3d4c
  headway keys import gateway.json                 keys of the setting
                                                   `api_keys` in this file

exit codes: 0 ok, 1 nothing was imported or the database is away, 2 usage or an
unusable file""",
)
DEFAULT_SCOPES = (Scope.INFERENCE, Scope.FILES, Scope.BATCHES)
KeysFile = Annotated[
    File | None,
    Parameter(
        name="--file",
        help="The file of keys, or store:; default: HEADWAY_GATEWAY_KEYS_FILE.",
    ),
]


class _Settings(msgspec.Struct):
    """Part of a gateway's settings file."""

    api_keys: dict[str, str] = {}


def _tenant_fits(_type: Any, name: str) -> None:
    if not 1 <= len(name) <= MAX_TENANT_CHARS:
        raise ValueError(f"must have 1 to {MAX_TENANT_CHARS} characters")


@KEYS.command
def create(
    *,
    tenant: Annotated[str, Parameter(metavar="NAME", validator=_tenant_fits)],
    scopes: Annotated[tuple[Scope, ...], Parameter(name="--scope")] = DEFAULT_SCOPES,
    expires: DurationText | None = None,
    file: KeysFile = None,
    json: JsonOption = False,
) -> int:
    """
    Make a key and print it; creates the file if necessary.

    Args:
        tenant: Tenant of the key.
        scopes: What the key may be used for; may be repeated.
        expires: Time after which the key ends, e.g. 90d.
    """
    lifetime_s = None if expires is None else parse_duration(expires, param="--expires")
    now = SystemClock().now()
    with edited_keys(_file(file)) as edit:
        entry, key = edit.create(
            tenant=TenantId(tenant), scopes=scopes, now=now, lifetime_s=lifetime_s
        )
    return _made(entry, key, as_json=json)


@KEYS.command
def rotate(
    key_id: Annotated[str, Parameter(name="id", help="Id of the key to replace.")],
    /,
    *,
    overlap: DurationText = "24h",
    file: KeysFile = None,
    json: JsonOption = False,
) -> int:
    """
    Make a key that replaces another one, and print it.

    Args:
        overlap: Time for which the old key is still valid.
    """
    overlap_s = parse_duration(overlap, param="--overlap")
    with edited_keys(_file(file)) as edit:
        entry, key = edit.rotate(key_id, overlap_s=overlap_s, now=SystemClock().now())
    if not json:
        print(f"{key_id} ends in {overlap}", file=sys.stderr)
    return _made(entry, key, as_json=json)


def _made(entry: ApiKey, key: str, *, as_json: bool) -> int:
    """Print a new key, which is shown only here."""
    if as_json:
        print_data({"key": key} | _shown(entry), as_json=True)
        return EXIT_OK
    print(f"{entry.id} of tenant {entry.tenant}; the key is shown only now:", file=sys.stderr)
    print(key)
    return EXIT_OK


@KEYS.command
def revoke(
    key_ids: Annotated[tuple[str, ...], Parameter(name="id", help="Ids of keys.")],
    /,
    *,
    file: KeysFile = None,
    json: JsonOption = False,
) -> int:
    """End keys now."""
    now = SystemClock().now()
    with edited_keys(_file(file)) as edit:
        revoked = [edit.revoke(each, now) for each in key_ids]
    if json:
        print_data([_shown(each) for each in revoked], as_json=True)
    else:
        print("\n".join(f"revoked {each.id} of tenant {each.tenant}" for each in revoked))
    return EXIT_OK


@KEYS.command(name="import")
def import_keys(
    settings_file: Annotated[File, Parameter(name="settings", help="Settings file of a gateway.")],
    /,
    *,
    file: KeysFile = None,
    json: JsonOption = False,
) -> int:
    """
    Add the keys of a gateway's setting `api_keys`.

    Raises:
        SettingsError: The file cannot be read or is invalid.
    """
    try:
        content = settings_file.read_bytes().removeprefix(BOM_UTF8)
        settings = msgspec.json.decode(content, type=_Settings)
    except OSError as error:
        raise SettingsError(f"cannot read {settings_file}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {settings_file}: {error}") from error
    added: list[ApiKey] = []
    num_short = 0
    now = SystemClock().now()
    with edited_keys(_file(file)) as edit:
        for key, tenant in settings.api_keys.items():
            entry = edit.add(key, TenantId(tenant), now)
            if entry is not None:
                added.append(entry)
                num_short += len(key) < SHORT_KEY_CHARS
    if json:
        print_data([_shown(each) for each in added], as_json=True)
    else:
        known = len(settings.api_keys) - len(added)
        print(f"imported {len(added)} keys; the file had {known} of them already")
    if num_short:
        print(
            f"{num_short} of them have fewer than {SHORT_KEY_CHARS} characters, so that a "
            "reader of the file may guess them from their digests. Replace them with "
            "`headway keys rotate`",
            file=sys.stderr,
        )
    return EXIT_OK if settings.api_keys else EXIT_FAILED


@KEYS.command(name="list")
def list_keys(*, file: KeysFile = None, json: JsonOption = False) -> int:
    """List the keys, without the keys themselves."""
    keys = listed_keys(_file(file))
    now = SystemClock().now()
    if json:
        print_data([_shown(key) for key in keys], as_json=True)
        return EXIT_OK
    table = Table()
    for name in ("id", "key", "tenant", "scopes", "created", "expires", "state"):
        table.add_column(name, no_wrap=name in ("id", "key", "tenant", "state"))
    for key in keys:
        table.add_row(
            key.id,
            f"...{key.last}" if key.last else "",
            key.tenant,
            ", ".join(scope.value for scope in key.scopes),
            _date(key.created_at),
            "" if key.expires_at is None else _date(key.expires_at),
            _state(key, now),
        )
    print_tables(table)
    return EXIT_OK


def _shown(key: ApiKey) -> dict[str, Any]:
    """A key's entry without its digest."""
    values: dict[str, Any] = msgspec.to_builtins(key)
    return {name: value for name, value in values.items() if name != "sha256"}


def _state(key: ApiKey, now: UnixTime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "valid" if key.is_valid(now) else "expired"


def _date(at: UnixTime) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="minutes")


def _file(given: Path | None) -> Path:
    """
    The file of keys.

    Raises:
        SettingsError: Neither the option nor the variable names one.
    """
    file = given or file_of("HEADWAY_GATEWAY_KEYS_FILE")
    if file is None:
        raise SettingsError("give --file FILE or set HEADWAY_GATEWAY_KEYS_FILE")
    return file
