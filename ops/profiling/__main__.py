"""`python -m ops.profiling`, the same as `headway profile`."""

import sys

from services.mesh.cli import main

raise SystemExit(main(["profile", *sys.argv[1:]]))
