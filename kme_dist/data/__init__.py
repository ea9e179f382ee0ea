"""Data: tables in, Zarr data sets and batches out. Independent of kernels and devices.

readers, csv_reader, matrix_readers     every source of rows as blocks
schema, survey, encode                  which columns, how encoded: blocks to numbers
ingest, append, splits, writer          rows to data sets; order, splits, shards
dataset, rows, plan, prefetch           data sets to batches
store, chunks, places, leases           Zarr groups, single chunks, disks and object stores, one writer at a time
statistics                              ranges and moments that can be merged
cluster                                 the only contact with Dask
"""
