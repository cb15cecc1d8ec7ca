"""`python -m shared.store`: the verbs of `headway store`, also in images without that command."""

from shared.runtime.program import Program
from shared.store.cli import store_app

raise SystemExit(Program(store_app("python -m shared.store")).main())
