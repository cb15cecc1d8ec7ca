"""The planning problem: snapshot, request groups, arrays and objective."""
