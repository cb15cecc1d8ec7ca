"""`make test`: every test that this machine can run; says first what it found."""

import os
import subprocess
import sys

from ops.environment import broker_for, engine_for


def main() -> int:
    """Run pytest; its exit code."""
    with broker_for(None) as (_, broker_line):
        print(f"test: {broker_line}", flush=True)
    print(f"test: {engine_for(None)[1]}", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=15", *sys.argv[1:]]
    return subprocess.run(command, check=False, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
