"""The grouper role: validates, admits and classifies requests into lanes."""
