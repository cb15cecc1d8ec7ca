"""Entry point of `python -m services.agent`."""

from services.agent.cli import main

raise SystemExit(main())
