"""Checkpoints: every bit comes back, damaged ones are passed over, those of another run refused."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest

from kme_dist.core import optim
from kme_dist.errors import ConfigError
from kme_dist.run.checkpoints import Checkpoints, Snapshot

IDENTITY = {"learn": {"batch_size": 1000, "seed": 0}, "data": "abc"}


def snapshot(step=7, best=True):
    rng = np.random.default_rng(step)
    parameters = {"length_scale": rng.normal(size=5), "0.scale": rng.normal(size=()), "regularization": np.array(-3.1)}
    state = optim.adam().init(parameters)
    _, state = optim.adam().update({k: rng.normal(size=v.shape) for k, v in parameters.items()}, state, 0.1)
    watch = {"mean": 1 / 3, "weight": 0.1, "least": math.inf, "since": 4, "stopped": 0}
    return Snapshot(step, parameters, state, {**watch, "best": parameters if best else None}, 12.5)


def assert_same_bits(a, b):
    assert a.step == b.step
    assert a.seconds == b.seconds
    assert {k: v for k, v in a.watch.items() if k != "best"} == {k: v for k, v in b.watch.items() if k != "best"}
    pairs = [(a.parameters, b.parameters), *((a.optimizer[slot], b.optimizer[slot]) for slot in b.optimizer)]
    if b.watch.get("best") is not None:
        pairs.append((a.watch["best"], b.watch["best"]))
    assert list(a.optimizer) == list(b.optimizer)
    for ours, theirs in pairs:
        assert list(ours) == list(theirs)
        for name in ours:
            assert ours[name].shape == theirs[name].shape
            assert ours[name].tobytes() == theirs[name].tobytes()


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adadelta"])
@pytest.mark.parametrize("best", [True, False])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path, optimizer, best):
    saved = snapshot(best=best)
    state = optim.optimizer_by_name(optimizer).init(saved.parameters)
    saved = Snapshot(saved.step, saved.parameters, state, saved.watch, saved.seconds)
    Checkpoints(tmp_path / "c").save(saved, IDENTITY)
    assert_same_bits(Checkpoints(tmp_path / "c").resume(IDENTITY), saved)


def test_nothing_there_means_nothing_to_resume(tmp_path):
    assert Checkpoints(tmp_path / "absent").resume(IDENTITY) is None


def test_the_newest_is_resumed_and_only_a_few_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 30, 200, 1000):
        checkpoints.save(snapshot(step), IDENTITY)
    assert Checkpoints(tmp_path).resume(IDENTITY).step == 1000
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == [
        "step-0000000200.zarr",
        "step-0000001000.zarr",
    ]
    with pytest.raises(ConfigError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_they_are_written_every_so_many_steps_or_seconds(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, every_steps=10, every_s=60.0)
    assert [step for step in range(1, 31) if checkpoints.offer(snapshot(step), IDENTITY)] == [10, 20, 30]
    assert not checkpoints.offer(snapshot(31), IDENTITY)
    later = checkpoints._last_time + 61
    monkeypatch.setattr("kme_dist.run.checkpoints.time.monotonic", lambda: later)
    assert checkpoints.offer(snapshot(32), IDENTITY)


@pytest.mark.chaos(9)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "foreign"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(snapshot(10), IDENTITY)
    checkpoints.save(snapshot(20), IDENTITY)
    newest = tmp_path / "step-0000000020.zarr"
    chunk = next(p for p in (newest / "parameters").rglob("*") if p.is_file() and p.name != "zarr.json")
    if damage == "flipped":
        data = bytearray(chunk.read_bytes())
        data[3] ^= 1
        chunk.write_bytes(data)
    elif damage == "truncated":
        chunk.write_bytes(chunk.read_bytes()[:-9])
    elif damage == "missing":
        shutil.rmtree(newest / "parameters")
    else:
        (newest / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    again = Checkpoints(tmp_path)
    assert_same_bits(again.resume(IDENTITY), snapshot(10))
    assert "step-0000000020" in again.damaged[0]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"learn": {"batch_size": 2000, "seed": 0}, "data": "abc"}, r"learn\.batch_size was 1000, is now 2000"),
        ({"learn": {"batch_size": 1000, "seed": 0}, "data": "xyz"}, "data was 'abc', is now 'xyz'"),
        ({"learn": {"batch_size": 1000, "seed": 0, "mode": "x"}, "data": "abc"}, r"learn\.mode is new"),
        ({"learn": {"batch_size": 1000}, "data": "abc"}, r"learn\.seed is missing"),
    ],
)
def test_another_run_is_refused_by_name_and_left_alone(tmp_path, other, named):
    Checkpoints(tmp_path).save(snapshot(), IDENTITY)
    with pytest.raises(ConfigError, match=named) as caught:
        Checkpoints(tmp_path).resume(other)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert_same_bits(Checkpoints(tmp_path).resume(IDENTITY), snapshot())


def test_starting_over_forgets_them(tmp_path):
    Checkpoints(tmp_path / "c").save(snapshot(), IDENTITY)
    Checkpoints(tmp_path / "c").clear()
    assert Checkpoints(tmp_path / "c").resume(IDENTITY) is None
