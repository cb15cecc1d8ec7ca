"""`python -m shared.store`: the verbs of `headway store`, also in images without that command."""

import sys

from shared.store.cli import main

raise SystemExit(main(sys.argv[1:], prog="python -m shared.store"))
