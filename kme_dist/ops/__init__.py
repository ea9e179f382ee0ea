"""Clusters, jobs, schedules, certificates and telemetry: what an operator needs around the computation."""
