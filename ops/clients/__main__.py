"""`python -m ops.clients build`: builds the wheel `headway-client`."""

import argparse
import sys
from pathlib import Path

from ops.clients.wheel import build_wheel
from shared.contracts.errors import MeshError


def main() -> int:
    """Build the wheel; return 1 if it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m ops.clients", description=__doc__)
    parser.add_argument("verb", choices=("build",))
    parser.add_argument("--out", type=Path, default=Path("dist"), help="default: dist")
    options = parser.parse_args()
    try:
        print(build_wheel(options.out))
    except MeshError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
