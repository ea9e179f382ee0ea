"""Pages and plots of a run, drawn from what it wrote."""
