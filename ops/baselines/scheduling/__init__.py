"""Engine scheduling policies of other papers."""
