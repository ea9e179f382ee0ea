"""What `MCEClassifier()` gives on tables that nobody tuned it for, beside other classifiers: see `__main__`."""
