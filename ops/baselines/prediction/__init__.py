"""QoServe's random forest of iteration times."""
