"""What every service process needs: settings, logging, life cycle, clock, metrics, CLI."""
