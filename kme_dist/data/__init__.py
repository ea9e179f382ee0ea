"""Where data live: tables in, Zarr data sets and batches out. Knows nothing of kernels or devices."""
