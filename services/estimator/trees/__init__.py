"""Quantile trees of prefill times: samples, fits, artefacts, and the trees that routers use."""
