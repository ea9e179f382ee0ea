"""Run every benchmark: `make bench`."""

from benchmarks import data_plane, defaults, features, gradient, means

BENCHMARKS = {
    "gradient": gradient,
    "features": features,
    "means": means,
    "data plane": data_plane,
    "defaults": defaults,
}

# The others need a cluster and minutes: python -m benchmarks.{rounds,fit,predict,telemetry,mnist,calibration}
for title, benchmark in BENCHMARKS.items():
    print(f"\n== {title} ==", flush=True)
    benchmark.main([])
