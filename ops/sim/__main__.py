"""`python -m ops.sim`, the same as `headway simulate`."""

import sys

from services.mesh.cli import main

raise SystemExit(main(["simulate", *sys.argv[1:]]))
