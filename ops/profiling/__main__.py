"""`python -m ops.profiling`, which `headway profile` starts."""

import sys
from collections.abc import Sequence

from ops.profiling.cli import profile
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from shared.runtime.logging import configure_logging


def main(arguments: Sequence[str]) -> int:
    """Profile an engine or a model shape; return the exit code."""
    try:
        return profile(arguments)
    except KeyboardInterrupt:
        return EXIT_OK
    except SettingsError as error:
        print(f"headway profile: {error}", file=sys.stderr)
        return EXIT_USAGE
    except MeshError as error:
        print(f"headway profile: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    configure_logging(level="warning", service="headway")
    raise SystemExit(main(sys.argv[1:]))
