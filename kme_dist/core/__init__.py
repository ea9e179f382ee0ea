"""The mathematics of the papers: arrays in, arrays out. No files, clocks, clusters or global state."""
