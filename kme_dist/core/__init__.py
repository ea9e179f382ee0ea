"""The papers: arrays in, arrays out. No files, clocks, clusters or global state in here."""
