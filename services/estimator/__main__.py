"""Entry point of `python -m services.estimator`."""

from services.estimator.cli import main

raise SystemExit(main())
