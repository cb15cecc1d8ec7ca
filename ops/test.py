"""
`make test` and `make test-slow`: two tiers of tests, with the services that this machine has.

The first tier covers every feature in at most eight minutes on two cores. The second tier has
tests marked `slow` and properties with more examples, in at most twenty-five minutes. Test files
run in parallel, one process per core; `TEST_ARGS=-n0` runs them in turn. Tests that lack a service
or program are skipped; HEADWAY_REQUIRE lists services whose absence is a failure.
"""

import argparse
import os
import subprocess
import sys

from ops.environment import broker_for, engine_for

MAX_WORKERS = 4
"""Maximum number of worker processes; each may use about 2 GiB for an engine."""
TIERS = {"main": "not slow", "slow": "slow or hypothesis", "all": "slow or not slow"}


def main() -> int:
    """Run one tier of tests; return pytest's exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.test", description=__doc__)
    parser.add_argument("--tier", choices=TIERS, default="main", help="default: main")
    options, pytest_arguments = parser.parse_known_args()
    with broker_for(None) as (_, broker_line):
        print(f"test: {broker_line}", flush=True)
    print(f"test: {engine_for(None)[1]}", flush=True)
    workers = min(os.cpu_count() or 1, MAX_WORKERS)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--durations=10"),
        # Tests are distributed by file, since the tests of one file share engines and meshes.
        # Files of few long tests come first in alphabetical order, and would come last by number.
        *(f"--numprocesses={workers}", "--dist=loadfile", "--no-loadscope-reorder"),
        *("-m", TIERS[options.tier], *pytest_arguments),
    ]
    environment = os.environ | {
        # More threads would only wait for each other.
        "OMP_NUM_THREADS": "1",
        "HEADWAY_HYPOTHESIS": "quick" if options.tier == "main" else "thorough",
    }
    # Without bytecode files, each of many processes would compile the modules and tests for
    # seconds.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(command, check=False, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
