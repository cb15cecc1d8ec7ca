"""
Random credentials for a mesh on Kubernetes: `python -m ops.generate.credentials`.

Writes files to the folder that `ops/kubernetes/credentials/kustomization.yaml` reads: URLs of the
broker, the broker's definitions with the same passwords, the cookie of its nodes, and the digest of
one API key. Only the owner can read them, and git ignores the folder.
"""

import argparse
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from ops.generate.definitions import GRANTS, definitions, render
from shared.contracts.base import TenantId
from shared.contracts.tenants.keys import Scope
from shared.runtime.clock import SystemClock
from shared.tenants.keys import KeyEdit, encode_keys

FOLDER = Path(__file__).resolve().parents[1] / "kubernetes" / "credentials" / "secrets"
HOST = "headway-rabbitmq:5672"
"""The Service of the broker in `ops/kubernetes/rabbitmq`."""
PASSWORD_BYTES = 24
SCOPES = (Scope.INFERENCE, Scope.FILES, Scope.BATCHES)


def credentials(
    passwords: Mapping[str, str], *, host: str, cookie: str, keys: bytes
) -> dict[str, bytes]:
    """
    Name of each file -> its content.

    Args:
        passwords: Login of the broker -> password of letters, digits, `-` and `_`.
        host: Host and port of the broker.
        cookie: Secret that the broker's nodes share.
        keys: Content of a file of API keys.
    """
    urls = [
        f"{user.removeprefix('headway-')}=amqp://{user}:{password}@{host}/\n"
        for user, password in passwords.items()
    ]
    return {
        "amqp.env": "".join(urls).encode(),
        "definitions.json": render(definitions(passwords=dict(passwords))).encode(),
        "erlang-cookie": cookie.encode(),
        "keys.json": keys,
    }


def write_new(folder: Path, files: Mapping[str, bytes]) -> None:
    """
    Write files that only their owner can read.

    Raises:
        FileExistsError: One of them exists; nothing is written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in files:
        if (folder / name).exists():
            raise FileExistsError(f"{folder / name} exists: the mesh may use its passwords")
    for name, content in files.items():
        made = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(made, "wb") as file:
            file.write(content)


def main(argv: list[str] | None = None) -> int:
    """Write new credentials and print the API key, which is stored nowhere."""
    parser = argparse.ArgumentParser(prog="python -m ops.generate.credentials", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=FOLDER, metavar="DIR", help="folder of the files"
    )
    parser.add_argument(
        "--host", default=HOST, metavar="HOST:PORT", help=f"address of the broker ({HOST})"
    )
    parser.add_argument("--tenant", default="default", help="tenant of the API key (default)")
    options = parser.parse_args(argv)
    edit = KeyEdit()
    _, key = edit.create(tenant=TenantId(options.tenant), scopes=SCOPES, now=SystemClock().now())
    files = credentials(
        {grant.user: secrets.token_urlsafe(PASSWORD_BYTES) for grant in GRANTS},
        host=options.host,
        cookie=secrets.token_urlsafe(PASSWORD_BYTES),
        keys=encode_keys(edit.keys),
    )
    try:
        write_new(options.out, files)
    except OSError as error:
        print(f"credentials: {error}", file=sys.stderr)
        return 1
    print(f"written to {options.out}; the API key is shown only now:", file=sys.stderr)
    print(key)
    return 0


if __name__ == "__main__":
    sys.exit(main())
