"""Entry point of `python -m services.gateway`."""

import sys

from services.gateway.cli import main

if __name__ == "__main__":
    sys.exit(main())
