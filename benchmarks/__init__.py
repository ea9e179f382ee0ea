"""Benchmarks: one claim each, ratios measured in one run. `make bench` runs them all."""
