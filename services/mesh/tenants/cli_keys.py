"""`headway keys`: the API keys of a file or of the store."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from services.mesh.tenants.key_places import edited_keys, listed_keys
from shared.contracts.base import TenantId, UnixTime
from shared.contracts.errors import ContractError, SettingsError, StoreUnavailableError
from shared.contracts.tenants.keys import ApiKey, Scope
from shared.runtime.arguments import TextHelpFormatter
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from shared.tenants.keys import SHORT_KEY_CHARS
from shared.tenants.policies import MAX_TENANT_CHARS
from shared.tenants.usage_questions import parse_duration

Options = argparse.Namespace

DESCRIPTION = """\
Create, list, rotate and revoke the API keys of a file or of the store.

Gateways with the setting `keys_file` follow the file: a key that is revoked is refused within two
seconds. The file has the digests of keys only, and only its owner can read it.

The file `store:` is the store of the variables HEADWAY_STORE_URL or HEADWAY_STORE_DATA_DIR, for
gateways with `keys_file=store:`."""
EPILOG = """\
examples:
  headway keys create --tenant acme --expires 90d      prints the key, which is shown only once
  headway keys rotate key-1f2e3d4c --overlap 24h       a new key; the old one ends after a day
  headway keys revoke key-1f2e3d4c
  headway keys import gateway.json                     keys of the setting `api_keys` in this file

exit codes: 0 ok, 1 nothing was imported or the database is away, 2 usage or an unusable file"""
DEFAULT_SCOPES = (Scope.INFERENCE, Scope.FILES, Scope.BATCHES)


class _Settings(msgspec.Struct):
    """Part of a gateway's settings file."""

    api_keys: dict[str, str] = {}


def parser(file: Path | None) -> argparse.ArgumentParser:
    """Create the parser of the command line; *file* is the default file."""
    root = argparse.ArgumentParser(
        prog="headway keys",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=TextHelpFormatter,
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.add_argument(
            "--file",
            type=Path,
            default=file,
            metavar="FILE",
            help="the file of keys, or store:; default: HEADWAY_GATEWAY_KEYS_FILE",
        )
        made.add_argument("--json", action="store_true", help="machine-readable output")
        return made

    create = verb("create", "make a key and print it; creates the file if necessary")
    create.add_argument("--tenant", required=True, metavar="NAME", help="tenant of the key")
    create.add_argument(
        "--scope",
        action="append",
        dest="scopes",
        choices=[scope.value for scope in Scope],
        help="what the key may be used for; may be repeated; default: "
        f"{', '.join(scope.value for scope in DEFAULT_SCOPES)}",
    )
    create.add_argument(
        "--expires", metavar="DURATION", help="time after which the key ends, e.g. 90d"
    )
    verb("list", "list the keys, without the keys themselves")
    rotate = verb("rotate", "make a key that replaces another one, and print it")
    rotate.add_argument("id", help="id of the key to replace")
    rotate.add_argument(
        "--overlap",
        default="24h",
        metavar="DURATION",
        help="time for which the old key is still valid (default: 24h)",
    )
    revoke = verb("revoke", "end keys now")
    revoke.add_argument("ids", nargs="+", metavar="ID", help="ids of keys")
    imported = verb("import", "add the keys of a gateway's setting `api_keys`")
    imported.add_argument("settings", type=Path, help="settings file of a gateway")
    return root


def create(options: Options, now: UnixTime) -> int:
    """Make a key."""
    if not 1 <= len(options.tenant) <= MAX_TENANT_CHARS:
        raise SettingsError(f"--tenant must have 1 to {MAX_TENANT_CHARS} characters")
    lifetime_s = None
    if options.expires is not None:
        lifetime_s = parse_duration(options.expires, param="--expires")
    scopes = tuple(Scope(each) for each in options.scopes or ()) or DEFAULT_SCOPES
    with edited_keys(options.file) as edit:
        entry, key = edit.create(
            tenant=TenantId(options.tenant), scopes=scopes, now=now, lifetime_s=lifetime_s
        )
    return _made(options, entry, key)


def rotate(options: Options, now: UnixTime) -> int:
    """Replace a key."""
    overlap_s = parse_duration(options.overlap, param="--overlap")
    with edited_keys(options.file) as edit:
        entry, key = edit.rotate(options.id, overlap_s=overlap_s, now=now)
    if not options.json:
        print(f"{options.id} ends in {options.overlap}", file=sys.stderr)
    return _made(options, entry, key)


def _made(options: Options, entry: ApiKey, key: str) -> int:
    """Print a new key, which is shown only here."""
    if options.json:
        print_data({"key": key} | _shown(entry), as_json=True)
        return EXIT_OK
    print(f"{entry.id} of tenant {entry.tenant}; the key is shown only now:", file=sys.stderr)
    print(key)
    return EXIT_OK


def revoke(options: Options, now: UnixTime) -> int:
    """End keys."""
    with edited_keys(options.file) as edit:
        revoked = [edit.revoke(each, now) for each in options.ids]
    if options.json:
        print_data([_shown(each) for each in revoked], as_json=True)
    else:
        print("\n".join(f"revoked {each.id} of tenant {each.tenant}" for each in revoked))
    return EXIT_OK


def import_keys(options: Options, now: UnixTime) -> int:
    """Add the keys of a gateway's settings."""
    try:
        settings = msgspec.json.decode(options.settings.read_bytes(), type=_Settings)
    except OSError as error:
        raise SettingsError(f"cannot read {options.settings}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {options.settings}: {error}") from error
    added: list[ApiKey] = []
    num_short = 0
    with edited_keys(options.file) as edit:
        for key, tenant in settings.api_keys.items():
            entry = edit.add(key, TenantId(tenant), now)
            if entry is not None:
                added.append(entry)
                num_short += len(key) < SHORT_KEY_CHARS
    if options.json:
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


def list_keys(options: Options, now: UnixTime) -> int:
    """List keys."""
    keys = listed_keys(options.file)
    if options.json:
        print_data([_shown(key) for key in keys], as_json=True)
        return EXIT_OK
    table = Table()
    for name in ("id", "key", "tenant", "scopes", "created", "expires", "state"):
        table.add_column(name, overflow="fold")
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
    Console().print(table)
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


VERBS: dict[str, Callable[[Options, UnixTime], int]] = {
    "create": create,
    "list": list_keys,
    "rotate": rotate,
    "revoke": revoke,
    "import": import_keys,
}


def main(argv: Sequence[str]) -> int:
    """Run one verb with the arguments *argv*; return the exit code."""
    file = os.environ.get("HEADWAY_GATEWAY_KEYS_FILE")
    options = parser(Path(file) if file else None).parse_args(argv)
    try:
        return _run(options)
    except (SettingsError, ContractError) as error:
        print(f"headway keys: {error}", file=sys.stderr)
        return EXIT_USAGE
    except StoreUnavailableError as error:
        print(f"headway keys: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(options: Options) -> int:
    if options.file is None:
        raise SettingsError("give --file FILE or set HEADWAY_GATEWAY_KEYS_FILE")
    return VERBS[options.verb](options, SystemClock().now())
