"""The functional core: every decision, deterministic, without IO, clock or logging."""
