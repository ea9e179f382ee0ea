"""Where data live: tables in, Zarr data sets and batches out. Knows nothing of kernels or devices.

readers, csv_reader, matrix_readers     every source of rows as blocks
schema, survey, encode                  which columns, how encoded: blocks to numbers
ingest, append, splits, writer          rows to data sets; order, parts, shards
dataset, plan, batches, prefetch        data sets to batches
store, chunks, places, leases           Zarr groups, single chunks, disks and object stores, one writer at a time
statistics                              ranges and moments that can be merged
cluster                                 the only contact with Dask
"""
