"""Random bodies for the gateway's HTTP interface: `python -m ops.fuzz`."""
