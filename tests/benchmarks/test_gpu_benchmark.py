"""The benchmark of a GPU runs on every machine, so that it works when there is one."""

from __future__ import annotations

import pytest

from benchmarks import gpu
from kme_dist import backend


def test_without_a_device_it_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(backend, "gpu_available", lambda: False)
    gpu.main([])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "no CUDA device: 9 measurements ran on NumPy in a tiny size, nothing was measured"


def test_every_measurement_runs_on_a_device_beside_its_roofline(device, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "Sizes", lambda: gpu.TINY)
    gpu.main(["--card", "h100"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "measured, and at most by the data sheet of the H100 SXM"
    assert len(lines) == 9
    assert all(line.endswith("%") for line in lines)
    assert any("tile times V" in line and "by memory" in line for line in lines)


@pytest.mark.gpu
def test_every_measurement_runs_on_a_gpu(request):
    request.getfixturevalue("gpu")
    sizes = gpu.Sizes(predicted=1 << 16, batch=2048, repeats=2)
    assert len([measured.line() for measured in gpu.Bench("cupy", gpu.CARDS["a100"], sizes).run()]) == 16


def test_rooflines():
    card = gpu.Card("made up", float32=100.0, float64=50.0, memory=10.0, bus=1.0)
    assert card.seconds(flops=200, moved=10) == (2.0, "operations")
    assert card.seconds(flops=200, moved=10, dtype="float64") == (4.0, "operations")
    assert card.seconds(flops=200, moved=30) == (3.0, "memory")
