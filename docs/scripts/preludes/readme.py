"""A data frame with labels, and new rows."""

from sklearn.datasets import load_wine

frame = load_wine(as_frame=True).data
labels = load_wine().target
new_frame = frame[::10]
