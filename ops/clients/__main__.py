"""`python -m ops.clients build`: builds the wheel `headway-client` and the npm package."""

import argparse
import sys
from pathlib import Path

from ops.clients.npm import build_npm
from ops.clients.wheel import build_wheel
from shared.contracts.errors import MeshError

BUILDERS = {"python": build_wheel, "javascript": build_npm}


def main() -> int:
    """Build the packages that are named, by default all; return 1 if one cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m ops.clients", description=__doc__)
    parser.add_argument("verb", choices=("build",))
    parser.add_argument("languages", nargs="*", metavar="LANGUAGE", help=", ".join(BUILDERS))
    parser.add_argument("--out", type=Path, default=Path("dist"), help="default: dist")
    options = parser.parse_args()
    for language in options.languages:
        if language not in BUILDERS:
            parser.error(f"unknown language {language}: must be {' or '.join(BUILDERS)}")
    try:
        for language in options.languages or BUILDERS:
            print(BUILDERS[language](options.out))
    except MeshError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
