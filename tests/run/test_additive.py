"""Additive models: chunks are added and removed, models merged, and the result equals a new fit."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist import errors, open_dataset
from kme_dist.core.features import from_config
from kme_dist.core.kernels import Gaussian
from kme_dist.core.sums import Centres, FeatureBasis
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.fit import FitStatistics, add_rows, additive, gather, refit, remove_rows
from kme_dist.run.scratch import Scratch

M, KERNEL = 3, Gaussian(length_scale=np.full(3, 0.5))
PLAIN = Scaling(np.zeros(3), np.ones(3))


def table(n, seed):
    rng = np.random.default_rng(seed)
    X = rng.random((n, 3)).astype(np.float32)
    return X, np.concatenate([np.arange(M), (2.9 * X[M:, 0]).astype(int)])


def stored(place, n, seed):
    return ingest(table(n, seed), place, chunk_bytes=600, shard_bytes=2400)


@pytest.fixture
def basis():
    return Centres(KERNEL, table(30, 99)[0])


@pytest.fixture
def tools(tmp_path):
    return {"executor": SerialExecutor(), "scratch": Scratch.at(tmp_path / "scratch")}


def rows(data):
    return RowsRef.of(data, split=None, scaling=PLAIN, dtype="float32", classes=True)


def weights(statistics, tools, lam=1e-4, **more):
    return refit(statistics, lam, scaling=PLAIN, retune=bool(more), **tools, **more).embedding.weights


QUERIES = table(200, 77)[0].astype(np.float64)


def decisions(statistics, tools):
    return refit(statistics, 1e-4, scaling=PLAIN, retune=False, **tools).embedding.decision(QUERIES)


def close(one, other):
    return np.abs(one - other).max() <= 1e-8


@pytest.mark.parametrize(("chunks", "tasks"), [(1, 1), (5, 5), (25, 8), (64, 8), (65, 16), (1000, 128)])
def test_tasks_are_of_about_one_size_and_few_workers_share_them_evenly(chunks, tasks):
    spans = [(i * 8192, (i + 1) * 8192) for i in range(chunks)]
    groups = additive._groups(spans)
    assert [span for group in groups for span in group] == spans, "every chunk once, in order"
    assert len(groups) == tasks
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1


def test_added_chunks_equal_a_fit_from_scratch(basis, tools, tmp_path):
    first, second = stored(tmp_path / "a.zarr", 320, 1), stored(tmp_path / "b.zarr", 217, 2)
    both = ingest(
        tuple(np.concatenate(parts) for parts in zip(table(320, 1), table(217, 2), strict=True)),
        tmp_path / "c.zarr", chunk_bytes=600, shard_bytes=2400,
    )  # fmt: skip
    grown = gather(rows(first), basis, **tools)
    assert add_rows(grown, rows(second), **tools) == 217
    scratch = gather(rows(both), basis, **tools)
    assert grown.rows == scratch.rows == 537
    assert close(decisions(grown, tools), decisions(scratch, tools))


def test_lambda_and_its_loss_are_those_of_a_fit_from_scratch(basis, tools, tmp_path, monkeypatch):
    monkeypatch.setattr(additive.Sample, "of", functools_partial_size(150))
    monkeypatch.setattr("kme_dist.core.nystrom.SAMPLE_ROWS", 150)
    first, second = stored(tmp_path / "a.zarr", 256, 1), stored(tmp_path / "b.zarr", 256, 2)
    one_way, other_way = gather(rows(first), basis, **tools), gather(rows(second), basis, **tools)
    add_rows(one_way, rows(second), **tools)
    add_rows(other_way, rows(first), **tools)
    assert len(one_way.sample.y) == 150
    np.testing.assert_array_equal(one_way.sample.X, other_way.sample.X)
    one, other = (refit(s, 1e-4, scaling=PLAIN, floor=1e-3, **tools) for s in (one_way, other_way))
    assert one.regularization == other.regularization
    assert one.loss == pytest.approx(other.loss, rel=1e-8)


def functools_partial_size(size):
    original = additive.Sample.of.__func__
    return classmethod(lambda cls, X, y, key, weights=None: original(cls, X, y, key, size, weights))


def test_no_chunk_counts_twice(basis, tools, tmp_path):
    data = stored(tmp_path / "a.zarr", 300, 1)
    statistics = gather(rows(data), basis, **tools)
    before = weights(statistics, tools)
    assert add_rows(statistics, rows(data), **tools) == 0
    copied = stored(tmp_path / "copy.zarr", 300, 1)
    assert add_rows(statistics, rows(copied), **tools) == 0, "the same content under another address"
    np.testing.assert_array_equal(weights(statistics, tools), before)


def test_data_that_grew_add_what_is_new(basis, tools, tmp_path):
    """The last chunk was not full; its old rows stay counted once."""
    data = stored(tmp_path / "a.zarr", 333, 1)
    assert data.rows % data.chunk_rows
    statistics = gather(rows(data), basis, **tools)
    data.append(table(100, 2))
    grown = open_dataset(tmp_path / "a.zarr")
    assert add_rows(statistics, rows(grown), **tools) == 100
    assert add_rows(statistics, rows(grown), **tools) == 0
    assert statistics.rows == 433
    assert close(decisions(statistics, tools), decisions(gather(rows(grown), basis, **tools), tools))


def test_removed_chunks_leave_no_trace(basis, tools, tmp_path):
    first, second = stored(tmp_path / "a.zarr", 300, 1), stored(tmp_path / "b.zarr", 217, 2)
    statistics = gather(rows(first), basis, **tools)
    wanted = decisions(statistics, tools)
    add_rows(statistics, rows(second), **tools)
    assert not close(decisions(statistics, tools), wanted)
    assert remove_rows(statistics, rows(second), **tools) == 217
    assert remove_rows(statistics, rows(second), **tools) == 0, "they are out already"
    assert statistics.rows == 300
    assert close(decisions(statistics, tools), wanted)
    assert add_rows(statistics, rows(second), **tools) == 217, "and may come back"


def test_a_model_without_rows_is_an_error(basis, tools, tmp_path):
    data = stored(tmp_path / "a.zarr", 100, 1)
    statistics = gather(rows(data), basis, **tools)
    remove_rows(statistics, rows(data), **tools)
    with pytest.raises(errors.DataError, match="has no rows left"):
        weights(statistics, tools)


def test_merged_models_equal_one_fit(basis, tools, tmp_path):
    first, second = stored(tmp_path / "a.zarr", 300, 1), stored(tmp_path / "b.zarr", 217, 2)
    merged, other = gather(rows(first), basis, **tools), gather(rows(second), basis, **tools)
    together = gather(rows(first), basis, **tools)
    add_rows(together, rows(second), **tools)
    assert merged.merge(other) == 217
    assert close(decisions(merged, tools), decisions(together, tools))
    assert merged.merge(other) == 0, "a second time changes nothing"
    add_rows(other, rows(stored(tmp_path / "d.zarr", 50, 3)), **tools)
    with pytest.raises(errors.ConfigError, match="chunks are in both models"):
        merged.merge(other)
    foreign = gather(rows(first), Centres(KERNEL, table(30, 98)[0]), **tools)
    with pytest.raises(errors.ConfigError, match="only models with the same basis merge"):
        merged.merge(foreign)


@pytest.mark.parametrize("explicit", [False, True])
def test_statistics_come_back_from_disk(explicit, basis, tools, tmp_path):
    if explicit:
        features = from_config({"name": "random_fourier", "features": 20}, n_features=3, seed=0)
        basis = FeatureBasis(features, features.forward(np.zeros((1, 3))).shape[1])
    data = stored(tmp_path / "a.zarr", 300, 1)
    statistics = gather(rows(data), basis, **tools)
    add_rows(statistics, rows(stored(tmp_path / "b.zarr", 50, 2)), **tools)
    statistics.save(tmp_path / "s.zarr")
    back = FitStatistics.load(tmp_path / "s.zarr")
    np.testing.assert_array_equal(weights(back, tools), weights(statistics, tools))
    assert back.ledger == statistics.ledger
    assert add_rows(back, rows(data), **tools) == 0


def test_the_oldest_parts_are_joined(basis, tools, tmp_path):
    statistics = gather(rows(stored(tmp_path / "0.zarr", 40, 0)), basis, **tools)
    for seed in range(1, 12):
        add_rows(statistics, rows(stored(tmp_path / f"{seed}.zarr", 40, seed)), **tools)
    assert len(statistics.parts) == 8
    assert statistics.rows == 480
    assert sum(statistics.ledger.values()) == sum(len(part.ledger) for part in statistics.parts)


def test_nothing_stays_in_the_scratch_place(basis, tools, tmp_path):
    statistics = gather(rows(stored(tmp_path / "a.zarr", 100, 1)), basis, **tools)
    weights(statistics, tools, floor=1e-3)
    assert not [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()]


def test_a_device_sums_chunks_that_moved_ahead(device, tmp_path):
    """Chunks of different sizes, in buffers that are used again."""
    data = stored(tmp_path / "rows.zarr", 200, 5)
    spans, found = ((0, 60), (60, 75), (75, 160), (160, 200)), {}
    for name in ("numpy", "cupy"):
        ref = additive.publish(Centres(KERNEL, table(30, 99)[0]), Scratch(), name)
        found[name] = additive.sum_chunks(rows(data), ref, spans, "some")
    for read in (lambda sums: np.tril(additive.unpacked(sums.G, 30)), lambda sums: sums.B):
        host, card = (read(found[name].sums) for name in ("numpy", "cupy"))
        np.testing.assert_allclose(card, host, rtol=0, atol=2e-5 * np.abs(host).max())
    assert found["cupy"].ledger == found["numpy"].ledger
    assert np.array_equal(found["cupy"].sample.X, found["numpy"].sample.X)
