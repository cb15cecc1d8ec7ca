"""`headway batch`: batches of requests over a gateway's HTTP interface."""
