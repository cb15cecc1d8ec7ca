"""`make check`: words, format, lint, architecture and types; runs no tests."""

import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
STEPS = (
    ("words", [sys.executable, "-m", "ops.words"]),
    ("rooms", [sys.executable, "-m", "ops.rooms"]),
    ("format", [str(BIN / "ruff"), "format", "--check", "."]),
    ("lint", [str(BIN / "ruff"), "check", "."]),
    ("architecture", [str(BIN / "lint-imports")]),
    ("types", [str(BIN / "mypy")]),
)


def main() -> int:
    """Run every step of the check; return 1 if any step failed."""
    failed = []
    for name, command in STEPS:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - began:.1f} s", flush=True)
    print(f"check: failed: {', '.join(failed)}" if failed else "check: passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
