"""Execution: training, fitting, prediction and evaluation, in this process or on the workers of a cluster."""
