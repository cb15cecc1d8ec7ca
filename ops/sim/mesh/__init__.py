"""A mesh of instances, models and lanes in virtual time, planned by production code (QLM)."""
