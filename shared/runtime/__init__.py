"""Common parts of service processes: settings, logging, life cycle, clock, metrics, CLI."""
