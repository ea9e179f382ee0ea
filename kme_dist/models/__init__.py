"""Estimators: constructors store, `fit` calls `run`, `predict` calls `core`; saved as arrays and JSON."""
