"""Entry point of `python -m services.mesh`."""

from services.mesh.cli import main

raise SystemExit(main())
