"""
`make test`: every test that this machine can run; says first what it found.

Test files run side by side, one process a core; `TEST_ARGS=-n0` runs them one after the other.
"""

import os
import subprocess
import sys

from ops.environment import broker_for, engine_for

MAX_WORKERS = 4
"""Each may hold an engine with its host, some 2 GiB."""
SIDE_BY_SIDE = (f"--numprocesses={min(os.cpu_count() or 1, MAX_WORKERS)}", "--dist=loadfile")
"""By file, since the tests of one file share engines and meshes."""


def main() -> int:
    """Run pytest; its exit code."""
    with broker_for(None) as (_, broker_line):
        print(f"test: {broker_line}", flush=True)
    print(f"test: {engine_for(None)[1]}", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=15", *SIDE_BY_SIDE]
    command += sys.argv[1:]
    return subprocess.run(command, check=False, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
