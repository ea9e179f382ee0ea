"""Run every benchmark: `make bench`."""

from benchmarks import data_plane, features, gradient, means

BENCHMARKS = {
    "gradient": gradient,
    "features": features,
    "means": means,
    "data plane": data_plane,
}

# The others need a cluster and minutes to hours:
# python -m benchmarks.{rounds,scale,fit,predict,telemetry,soak,mnist,calibration,defaults,regression,independence};
# also benchmarks.large, and on a GPU benchmarks.gpu
for title, benchmark in BENCHMARKS.items():
    print(f"\n== {title} ==", flush=True)
    benchmark.main([])
