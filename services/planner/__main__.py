"""Entry point of `python -m services.planner`."""

from services.planner.cli import main

raise SystemExit(main())
