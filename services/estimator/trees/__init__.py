"""Quantile trees of prefill times: samples, fits, artefacts and the trees in force."""
