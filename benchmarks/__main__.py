"""Run every benchmark: `make bench`."""

from benchmarks import data_plane, defaults, gradient

for title, benchmark in (("gradient", gradient), ("data plane", data_plane), ("defaults", defaults)):
    print(f"\n== {title} ==", flush=True)
    benchmark.main([])
