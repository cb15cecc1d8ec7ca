"""QoServe's random forest, which predicts iteration times."""
