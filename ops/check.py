"""`make check`: lint, types, architecture and the fast tests, in that order."""

import os
import subprocess
import sys
from pathlib import Path

from ops.test import SIDE_BY_SIDE

BIN = Path(sys.executable).parent
STEPS = (
    ("format", [str(BIN / "ruff"), "format", "--check", "."]),
    ("lint", [str(BIN / "ruff"), "check", "."]),
    ("architecture", [str(BIN / "lint-imports"), "--no-cache"]),
    ("types", [str(BIN / "mypy")]),
    (
        "fast tests",
        [
            *(sys.executable, "-m", "pytest", "-q", *SIDE_BY_SIDE),
            *("-m", "not slow and not rabbitmq and not vllm"),
        ],
    ),
)


def main() -> int:
    """Stop at the first step that fails; its exit code."""
    # As in `ops.test`: with tests side by side more threads would only wait for one another.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name, command in STEPS:
        print(f"== {name}", flush=True)
        code = subprocess.run(command, check=False, env=environment).returncode
        if code:
            print(f"== {name} failed", flush=True)
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
