"""The outermost layer of a gateway's HTTP interface, which knows no application below it."""
