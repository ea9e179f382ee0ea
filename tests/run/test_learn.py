"""Learning over a cluster: the same bits whoever works, whatever dies, wherever it was interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from distributed import Client, LocalCluster, get_task_stream

from kme_dist.core import optim
from kme_dist.core.kernels import Gaussian
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import Scaling
from kme_dist.errors import ConfigError, DataError
from kme_dist.run import executors, learners
from kme_dist.run import learn as learning
from kme_dist.run.checkpoints import Checkpoints
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.learn import BatchRecord, batch_gradient, kernel_batches, learn_on_dataset
from kme_dist.run.learners import KernelLearner, LearnSettings, log_parameters, mean_named, mean_objectives
from kme_dist.run.trainer import Trainer

FEATURES = 5
KERNEL = Gaussian(length_scale=np.full(FEATURES, 0.8))
SETTINGS = LearnSettings(steps=12, batch_size=100, learning_rate=0.1, seed=3)
LEARNER = KernelLearner(KERNEL, SETTINGS, 3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    X = (rng.random((2300, FEATURES)) * [1, 10, 0.1, 5, 0] + [0, -5, 0, 100, 3]).astype(np.float32)
    y = (3 * X[:, 0]).astype(int)
    place = tmp_path_factory.mktemp("rounds") / "d.zarr"
    return ingest((X, y), place, shuffle=1, split="train=0.8,test=0.2", chunk_bytes="4KiB", shard_bytes="16KiB")


@pytest.fixture
def client(killable):
    return killable()


def run(data, executor=None, settings=SETTINGS, batches_per_step=3, **options):
    executor = executor or SerialExecutor()
    return learn_on_dataset(
        data, KERNEL, 0.1, settings, batches_per_step=batches_per_step, executor=executor, **options
    )


def bits(learned):
    values = [*learned.kernel.parameters.values(), learned.regularization]
    return b"".join(np.asarray(value, np.float64).tobytes() for value in values)


@pytest.fixture(scope="module")
def expected(data):
    return bits(run(data))


# --- what is learned --------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["rcb", "validation"])
@pytest.mark.parametrize("scaling", ["unit", "standard", None])
def test_rows_in_memory_and_rows_on_disk_teach_the_same_bits(data, objective, scaling):
    settings = LearnSettings(objective=objective, steps=8, batch_size=150, seed=4, prior_width=1.0)
    X, y = data.read("train")
    in_memory = run(ArrayRows(X, y, data.classes), settings=settings, batches_per_step=1, scaling=scaling)
    assert bits(run(data, settings=settings, batches_per_step=1, scaling=scaling)) == bits(in_memory)


def test_a_step_takes_the_mean_gradient_of_its_batches(data):
    batches = kernel_batches(data, SETTINGS, split="train", scaling="unit", dtype="float64")
    parameters = optim.to_log({**KERNEL.parameters, "regularization": np.array(0.1)})
    records = [batch_gradient(LEARNER, batches, number, parameters) for number in range(5)]
    mean = mean_objectives([record.objective for record in records])
    for name, value in mean.gradient.items():
        np.testing.assert_allclose(value, np.mean([r.objective.gradient[name] for r in records], axis=0), rtol=1e-13)
    for name in ("value", "risk", "complexity", "bound", "accuracy"):
        np.testing.assert_allclose(getattr(mean, name), np.mean([getattr(r.objective, name) for r in records]))


def test_the_stored_statistics_scale_rows_as_the_estimator_would(data):
    X, _ = data.read("train")
    wide = X.astype(np.float64)
    for kind in ("unit", None):
        expected = Scaling.learn(wide, kind).apply(X, "float32")
        np.testing.assert_array_equal(Scaling.of(data.split_statistics("train"), kind).apply(X, "float32"), expected)
    standard = Scaling.of(data.split_statistics("train"), "standard").apply(X, "float64")
    np.testing.assert_allclose(standard, Scaling.learn(wide, "standard").apply(X, "float64"), atol=1e-9)
    assert not standard[:, 4].any(), "a constant feature says nothing"
    with pytest.raises(ConfigError, match="scaling='cubic'"):
        Scaling.of(data.split_statistics("train"), "cubic")


def test_every_batch_of_the_plan_has_its_turn_and_only_training_rows_are_looked_at(data, monkeypatch):
    seen, numbers = set(), []
    real = learning.read_batch

    def spy(batches, number):
        numbers.append(number)
        seen.update(batches.plan.batch(number).rows.tolist())
        return real(batches, number)

    monkeypatch.setattr(learning, "read_batch", spy)
    run(data, settings=LearnSettings(steps=30, batch_size=100))
    train = {row for span in data.ranges("train") for row in range(*span)}
    assert numbers == list(range(90)), "three a step, none left out, none twice"
    assert seen <= train
    assert len(seen) > 0.9 * len(train)


def test_learning_lowers_the_objective_and_every_step_leaves_a_record(data):
    records = []
    learned = run(data, settings=LearnSettings(steps=40, batch_size=100), callback=records.append)
    assert [record["step"] for record in records] == list(range(1, 41))
    assert np.mean([r["objective"] for r in records[-5:]]) < 0.8 * np.mean([r["objective"] for r in records[:5]])
    assert learned.history == records
    wanted = {"objective", "risk", "complexity", "regularization", "gradient_norm", "rows_per_second", "waiting_share"}
    assert wanted <= set(records[0])
    assert all(0 <= record["waiting_share"] <= 1 for record in records)
    assert all(json.dumps(record) for record in records)


@pytest.mark.chaos(22)
def test_a_batch_without_some_classes_is_no_problem(tmp_path):
    X = np.linspace(0, 1, 400, dtype=np.float32)[:, None].repeat(FEATURES, axis=1)
    y = np.arange(400) // 100
    data = ingest((X, y), tmp_path / "sorted.zarr", chunk_bytes="2KiB", shard_bytes="4KiB")
    batches = kernel_batches(data, SETTINGS, split=None, scaling="unit", dtype="float32")
    batches = dataclasses.replace(batches, plan=dataclasses.replace(batches.plan, mode="contiguous", batch_size=50))
    record = batch_gradient(LEARNER, batches, 0, optim.to_log({**KERNEL.parameters, "regularization": np.array(0.1)}))
    assert isinstance(record, BatchRecord)
    assert record.objective.gradient["length_scale"].shape == (FEATURES,)


def test_what_cannot_be_learned_from_is_refused(data, tmp_path):
    with pytest.raises(ConfigError, match="batches_per_step=0"):
        run(data, batches_per_step=0)
    with pytest.raises(ConfigError, match="dtype='float16'"):
        run(data, dtype="float16")
    bare = ingest(np.zeros((10, 2), np.float32), tmp_path / "bare.zarr")
    with pytest.raises(DataError, match="no class labels"):
        run(bare)


# --- who works does not matter ----------------------------------------------------------------------


def test_two_workers_learn_the_same_bits_as_one_process(data, client, expected):
    assert bits(run(data, DaskExecutor(client))) == expected
    assert bits(run(data, DaskExecutor(client, direct=True))) == expected


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_any_number_of_workers_learns_the_same_bits(data, expected, workers):
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert bits(run(data, DaskExecutor(client))) == expected


@pytest.mark.chaos(2)
def test_workers_killed_at_random_do_not_show(data, client, expected):
    choose = random.Random(5)
    killed = []

    def kill(record):
        if record["step"] in (2, 3, 7, 9):
            pid = choose.choice(sorted(client.run(os.getpid, on_error="ignore").values()))  # one may be dying
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    assert bits(run(data, DaskExecutor(client), callback=kill)) == expected
    assert len(set(killed)) == 4


@pytest.mark.chaos(19)
def test_a_worker_that_hangs_does_not_show(data, client, expected):
    client.wait_for_workers(2, timeout=60)
    executor = DaskExecutor(client, patience_s=1.0, attempts=30)  # a busy machine may need a few

    def stop(record):
        if record["step"] == 4:
            os.kill(sorted(client.run(os.getpid).values())[0], signal.SIGSTOP)

    assert bits(run(data, executor, callback=stop)) == expected
    assert executor.retried > 0


def test_short_rounds_straight_to_the_workers_learn_the_same_bits(data, client, expected, monkeypatch):
    monkeypatch.setattr(executors, "_QUICK_S", 1e9)
    monkeypatch.setattr(executors, "_SHOWN_EVERY_S", 1e9)
    executor = DaskExecutor(client)
    assert bits(run(data, executor)) == expected
    assert executor._lanes.available, "there was no need for tasks"


# --- replicas with steps of their own ---------------------------------------------------------------

LOCAL = {"local_steps": 4, "batches_per_step": 3}


def test_one_replica_is_plain_descent_whatever_the_length_of_a_round(data):
    plain = bits(run(data, batches_per_step=1))
    assert bits(run(data, batches_per_step=1, local_steps=4)) == plain
    assert bits(run(data, batches_per_step=1, local_steps=12)) == plain


def test_replicas_keep_the_limits_of_the_calibrated_objective_in_every_step(data):
    """With such a rate nλ and the sharpness reach their limits: one replica is still plain descent."""
    settings = dataclasses.replace(SETTINGS, objective="calibrated", learning_rate=3.0, evaluated=40)
    plain = run(data, settings=settings, batches_per_step=1)
    free = learning.learn(
        KernelLearner(KERNEL, settings, 3), kernel_batches(data, settings),
        learners.kernel_start(KERNEL, 0.1, "calibrated"), settings,
    )  # fmt: skip
    assert plain.regularization != np.exp(free.parameters["regularization"]), "the limits matter here"
    assert bits(run(data, settings=settings, batches_per_step=1, local_steps=4)) == bits(plain)
    shift = 100 * run(data, settings=settings, **LOCAL).regularization
    assert learners.SHIFTS[0] * (1 - 1e-9) <= shift <= learners.SHIFTS[1] * (1 + 1e-9)


def test_a_plateau_stops_replicas_after_as_many_steps_as_plain_descent(data):
    settings = dataclasses.replace(SETTINGS, steps=600, batch_size=40, learning_rate=0.3, patience=20)
    plain = run(data, settings=settings, batches_per_step=1)
    found = run(data, settings=settings, batches_per_step=1, local_steps=10)
    assert plain.stopped_early
    assert found.stopped_early
    steps, rounds = plain.history[-1]["step"], found.history[-1]["step"]
    assert rounds < steps + 60, "not twenty rounds"


def test_replicas_that_meet_after_every_step_are_the_mean_gradient(data):
    """Of plain descent, where the mean of the steps is the step of the mean; and to rounding."""
    settings = LearnSettings(steps=6, batch_size=100, optimizer="sgd", learning_rate=1e-3, seed=3)
    mean = run(data, settings=settings)
    met = run(data, settings=settings, local_steps=1)
    np.testing.assert_allclose(met.kernel.parameters["length_scale"], mean.kernel.parameters["length_scale"], rtol=1e-9)
    assert met.regularization == pytest.approx(mean.regularization, rel=1e-9)
    assert bits(run(data, settings=settings, local_steps=6)) != bits(mean)


def test_a_round_of_replicas_is_their_mean_in_plan_order(data):
    settings = LearnSettings(steps=4, batch_size=100, seed=3)
    batches = kernel_batches(data, settings, split="train", scaling="unit", dtype="float32")
    trainer = Trainer(log_parameters(KERNEL, 0.1), settings)
    replicas = [
        learning.local_steps(
            KernelLearner(KERNEL, settings, 3), batches, r * 4, trainer.stepper, [0.1] * 4,
            (trainer.parameters, trainer.state),
        )
        for r in range(3)
    ]  # fmt: skip
    learned = run(data, settings=settings, **LOCAL)
    logs = np.mean([replica.parameters["length_scale"] for replica in replicas], axis=0)
    np.testing.assert_allclose(np.log(learned.kernel.parameters["length_scale"]), logs, rtol=1e-12)
    assert all(float(replica.state["count"]["steps"]) == 4 for replica in replicas)
    assert float(mean_named([replica.state["count"] for replica in replicas])["steps"]) == 4


def test_replicas_go_through_the_batches_that_the_mean_gradient_would(data, monkeypatch):
    numbers, real = [], learning.read_batch
    monkeypatch.setattr(learning, "read_batch", lambda rows, number: numbers.append(number) or real(rows, number))
    records = []
    run(data, callback=records.append, **LOCAL)
    assert sorted(numbers) == list(range(36))
    assert numbers[:12] == list(range(12)), "the first round: replica after replica, four batches each"
    assert [(record["step"], record["batches"]) for record in records] == [(4, 12), (8, 12), (12, 12)]


def test_replicas_learn_the_same_bits_on_workers_and_after_a_stop(data, client, tmp_path):
    whole = bits(run(data, **LOCAL))
    assert bits(run(data, DaskExecutor(client), **LOCAL)) == whole
    with pytest.raises(Stop):
        run(data, checkpoints=Checkpoints(tmp_path), callback=stop_at(8), **LOCAL)
    seen = []
    assert bits(run(data, checkpoints=Checkpoints(tmp_path), callback=seen.append, **LOCAL)) == whole
    assert [record["step"] for record in seen] == [12]
    with pytest.raises(ConfigError, match=r"learn\.local_steps was 4, is now 2"):
        run(data, checkpoints=Checkpoints(tmp_path), **{**LOCAL, "local_steps": 2})
    with pytest.raises(ConfigError, match=r"learn\.local_steps is missing"):
        run(data, checkpoints=Checkpoints(tmp_path))


def test_rounds_of_replicas_are_whole(data):
    with pytest.raises(ConfigError, match="local_steps=5: must be an integer >= 1 that divides steps=12"):
        run(data, local_steps=5)


# --- devices ----------------------------------------------------------------------------------------


def test_a_batch_goes_to_the_device_once_and_only_numbers_come_back(data, device, monkeypatch):
    """The stand-in refuses host arrays in device arithmetic, so nothing in between can have been on the host."""
    parameters = optim.to_log({**KERNEL.parameters, "regularization": np.array(0.1)})
    host, there = (
        kernel_batches(data, SETTINGS, split="train", scaling="unit", dtype="float64", backend=backend)
        for backend in ("numpy", "cupy")
    )
    moved, seen = [], []
    to_device, judge = learning.to_device, learners.batch_objective
    monkeypatch.setattr(learning, "to_device", lambda X, backend: moved.append(backend) or to_device(X, backend))
    monkeypatch.setattr(learners, "batch_objective", lambda *a: seen.append(a[3]) or judge(*a))
    record = batch_gradient(LEARNER, there, 0, parameters)
    assert moved == ["cupy"]
    device.host(seen[0])
    for name, value in batch_gradient(LEARNER, host, 0, parameters).objective.gradient.items():
        assert type(record.objective.gradient[name]) in (np.ndarray, np.float64)
        np.testing.assert_allclose(record.objective.gradient[name], value, rtol=1e-9)
    assert isinstance(record.objective.value, float)


def test_local_steps_move_the_next_batch_while_one_is_computed(data, device, monkeypatch):
    """Each batch is read once, in order; the result is that of batches that are read when they are needed."""
    numbers, real = [], learning.read_batch
    monkeypatch.setattr(learning, "read_batch", lambda rows, number: numbers.append(number) or real(rows, number))
    ahead = bits(run(data, backend="cupy", **LOCAL))
    assert numbers == list(range(36))
    monkeypatch.setattr(learning, "_batches_ahead", lambda batches, numbers: (None for _ in numbers))
    assert bits(run(data, backend="cupy", **LOCAL)) == ahead


def test_in_a_mixed_cluster_some_read_and_those_with_a_gpu_compute(data, device):
    """Workers in this process, so that the stand-in for CuPy is theirs too."""
    expected = bits(run(data, backend="cupy"))
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", resources={"GPU": 1}
        ) as cluster,
        Client(cluster) as client,
    ):
        options = {key: value for key, value in cluster.worker_spec[0]["options"].items() if key != "resources"}
        cluster.worker_spec["reader"] = {**cluster.worker_spec[0], "options": options}
        cluster.sync(cluster._correct_state)
        client.wait_for_workers(2, timeout=30)
        executor = DaskExecutor(client)
        assert (executor.gpus, executor.has_readers) == (1, True)
        with get_task_stream(client) as tasks:
            assert bits(run(data, executor, backend="cupy")) == expected
        workers = client.scheduler_info(n_workers=-1)["workers"]
        has_gpu = {address: bool(worker["resources"].get("GPU")) for address, worker in workers.items()}
        where = {
            name: {has_gpu[task["worker"]] for task in tasks.data if task["key"].startswith(name)}
            for name in ("read-batch", "batch-gradient")
        }
    assert where["batch-gradient"] == {True}
    assert False in where["read-batch"], "the one with the GPU may help when it is idle"


# --- interrupted and resumed ------------------------------------------------------------------------


class Stop(BaseException):
    """As Ctrl-C: not an Exception."""


def stop_at(step):
    def callback(record):
        if record["step"] == step:
            raise Stop

    return callback


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "adadelta"])
def test_an_interrupted_run_resumes_to_the_same_bits(data, tmp_path, optimizer):
    # A rate at which momentum converges: of a run that diverges each processor makes something else, or an overflow.
    settings = LearnSettings(steps=12, batch_size=100, optimizer=optimizer, learning_rate=1e-3, seed=3)
    whole = bits(run(data, settings=settings))
    for step in (5, 9):
        with pytest.raises(Stop):
            run(data, settings=settings, checkpoints=Checkpoints(tmp_path), callback=stop_at(step))
    seen = []
    finished = run(data, settings=settings, checkpoints=Checkpoints(tmp_path), callback=seen.append)
    assert [record["step"] for record in seen] == [10, 11, 12], "every whole step was saved on the way out"
    assert bits(finished) == whole
    seen.clear()
    assert bits(run(data, settings=settings, checkpoints=Checkpoints(tmp_path), callback=seen.append)) == whole
    assert not seen, "nothing was left to do"


def test_the_stopping_rule_and_the_best_iterate_are_resumed_too(data, tmp_path):
    settings = LearnSettings(steps=400, batch_size=100, learning_rate=0.5, patience=6, seed=1)
    whole = run(data, settings=settings)
    stopped = len(whole.history)
    assert whole.stopped_early
    with pytest.raises(Stop):
        run(data, settings=settings, checkpoints=Checkpoints(tmp_path), callback=stop_at(stopped - 2))
    again = run(data, settings=settings, checkpoints=Checkpoints(tmp_path))
    assert (bits(again), len(again.history), again.stopped_early) == (bits(whole), 2, True)


def test_a_run_may_be_made_longer_but_not_otherwise_changed(data, tmp_path):
    short = LearnSettings(steps=6, batch_size=100, learning_rate=0.1, seed=3)
    run(data, settings=short, checkpoints=Checkpoints(tmp_path))
    assert bits(run(data, checkpoints=Checkpoints(tmp_path))) == bits(run(data))
    with pytest.raises(ConfigError, match=r"learn\.learning_rate was 0\.1, is now 0\.2"):
        run(
            data,
            settings=LearnSettings(steps=12, batch_size=100, learning_rate=0.2, seed=3),
            checkpoints=Checkpoints(tmp_path),
        )
    with pytest.raises(ConfigError, match=r"learn\.batches_per_step was 3, is now 2"):
        run(data, batches_per_step=2, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.dtype was 'float32'"):
        run(data, dtype="float64", checkpoints=Checkpoints(tmp_path))


def test_a_run_whose_rate_falls_to_its_end_cannot_be_made_longer(data, tmp_path):
    falling = LearnSettings(steps=6, batch_size=100, schedule=optim.cosine_decay, seed=3)
    run(data, settings=falling, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(ConfigError, match=r"learn\.steps was 6, is now 8"):
        run(data, settings=dataclasses.replace(falling, steps=8), checkpoints=Checkpoints(tmp_path))


def test_other_data_are_refused(data, tmp_path):
    run(data, checkpoints=Checkpoints(tmp_path / "c"))
    X, y = data.read("train")
    X[0, 0] += 1e-3
    other = ingest((X, y), tmp_path / "other.zarr")
    with pytest.raises(ConfigError, match="data was"):
        run(other, checkpoints=Checkpoints(tmp_path / "c"))


CONFIG = """
data: {{source: {source}}}
model: {{kernel: {{name: gaussian, ard: true, length_scale: 0.8}}, objective: rcb, regularization: 0.1}}
learn: {{steps: 40, batch_size: 100, batches_per_step: 3, learning_rate: 0.1, seed: 3, checkpoint_steps: 7}}
cluster: {{kind: {kind}, workers: 1, dashboard: false}}
output: {{folder: {folder}}}
"""


def command(tmp_path, data, name, kind="serial"):
    config = tmp_path / f"{name}.yaml"
    config.write_text(CONFIG.format(source=data.path, folder=tmp_path / name, kind=kind))
    return [sys.executable, "-m", "kme_dist", "learn", str(config), "--json", "--quiet"]


def call(arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.chaos(7)
@pytest.mark.parametrize(
    ("kind", "kills"), [("local", [15]), pytest.param("serial", [1, 10, 25], marks=pytest.mark.slow)]
)
def test_a_killed_driver_resumes_to_the_same_bits(data, tmp_path, kind, kills):
    undisturbed = run(data, settings=LearnSettings(steps=40, batch_size=100, learning_rate=0.1, seed=3))
    arguments = command(tmp_path, data, "killed", kind)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for lines in kills:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < lines):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    code, printed, errors = call(arguments)
    assert code == 0, errors
    finished = json.loads(printed)
    assert finished["steps_now"] < 40, "it did not begin from the start"
    assert finished["kernel"] == undisturbed.kernel.to_config()
    assert finished["regularization"] == undisturbed.regularization
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 41)), "every step once, whatever was made twice"


# The command, which waits in its eleventh step: however fast the machine, the signal finds it there.
WAITING = """
import time
from kme_dist.cli import main
from kme_dist.run.trainer import Trainer

real = Trainer.advance

def advance(self, *arguments):
    if self.step == 10:
        time.sleep(600)
    return real(self, *arguments)

Trainer.advance = advance
main()
"""


def test_a_terminated_driver_saves_its_last_step_and_says_how_to_resume(data, tmp_path):
    arguments = command(tmp_path, data, "stopped")
    waiting = [sys.executable, "-c", WAITING, *arguments[3:]]
    process = subprocess.Popen(waiting, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 10):
        time.sleep(0.002)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "resume with: kme-dist learn" in errors
    assert metrics.read_text().count("\n") == 10
    code, printed, errors = call(arguments)
    assert code == 0, errors
    assert json.loads(printed)["steps_now"] == 30


# --- long loops -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_rounds_leave_memory_where_it_was(data):
    """Short rounds pass the scheduler by; those that do not would leave some hundred bytes each in Dask's own books.

    The scheduler lives in this process, so that one figure covers both.
    """
    import psutil

    from kme_dist.config import ClusterConfig
    from kme_dist.ops.cluster import open_executor

    memory, seconds = [], []

    def watch(record):
        seconds.append(record["round_seconds"])
        if record["step"] % 500 == 0:
            memory.append(psutil.Process().memory_info().rss / 2**20)

    settings = LearnSettings(steps=10_000, batch_size=20, learning_rate=0.01)
    with open_executor(ClusterConfig(workers=1, dashboard=False)) as executor:
        run(data, executor, settings=settings, batches_per_step=1, callback=watch)
    # By half-way the caches of bounded size are full, among them the records of the last steps.
    slope = np.polyfit(np.arange(len(memory[10:])) * 0.5, memory[10:], 1)[0]
    print(f"memory {memory[10]:.0f} to {memory[-1]:.0f} MiB, {slope:.2f} MiB per 1000 rounds")
    assert slope < 0.3
    print(f"round {1e3 * np.median(seconds[1000:2000]):.1f} ms early, {1e3 * np.median(seconds[-1000:]):.1f} ms late")
