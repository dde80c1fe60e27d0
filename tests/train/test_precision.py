"""Sixteen bits on PyTorch, and batches without a finite loss that are left out on all ranks."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import IntegrityError, TrainingError
from shardmill.ids import format_sample_id
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.lab.scale import exhaustive
from tests.processes import in_own_process
from tests.train.forked_ranks import launch_forked
from tests.train.learners import SHAPE, batch_of, learner
from tests.train.multi_rank_workers import LATE_SECONDS
from tests.train.ranks import WORKERS, Watcher, planned, train_on_ranks, usually_of
from tests.train.training import DriverRecorder, Killed, Recorder, task_of, train_here
from train.api import Learner, StatePart
from train.backends.torch.passes import FIRST_SCALE, LARGEST_SCALE, NUM_UPDATES_TO_DOUBLE, Precision
from train.checkpoints.arrays import OPTIMIZER, WEIGHTS, load_arrays, rank_file
from train.checkpoints.checkpoint import complete_checkpoints
from train.checkpoints.shards import WEIGHTS_PART, read_index
from train.config import TrainConfig
from train.launching.rank import DEFAULT_WORKER
from train.published.export import LOSS_TOLERANCE, export_training
from train.strategies import STRATEGIES, strategies_that_share

MODELS = "tests.train.torch_models"
STEEPNESS = "SHARDMILL_TEST_STEEPNESS"
# Overflows at the first scale, and not at a sixteenth of it or so; whatever else can act on gradients does.
STEEP = {"model": f"{MODELS}:Steep", "mixed_precision": "float16", "num_streams": 4, "global_batch_size": 24,
         "epochs": 4, "accumulation_steps": 4, "gradient_clip_norm": 0.5, "ema_decay": 0.9, "learning_rate": 0.01,
         "non_finite": {"action": "skip"}}  # fmt: skip


def scale_of(one: Learner) -> float:
    # Followed by the number of updates since it changed.
    return float(one.arrays(StatePart.OPTIMIZER)[-2])


def with_scale(one: Learner, scale: float) -> None:
    arrays = one.arrays(StatePart.OPTIMIZER)
    one.assign(StatePart.OPTIMIZER, [*arrays[:-2], np.array(scale, np.float32), arrays[-1]], "the test")


def test_an_export_is_compared_in_the_precision_that_was_trained_and_not_in_auto(tiny_uri, tmp_path):
    config = {"model": f"{MODELS}:smooth", "epochs": 1}
    result = train_here(tiny_uri, tmp_path, **config)
    # Twice the tolerance of float32; that of bfloat16 is five times as large.
    loss = result.evaluation.loss + 2 * LOSS_TOLERANCE * max(1.0, result.evaluation.loss)
    recorded = replace(result, evaluation=replace(result.evaluation, loss=loss))
    asked = TrainConfig(**config, mixed_precision="auto", backend="torch")
    with pytest.raises(IntegrityError, match="the export has loss"):
        export_training(str(tmp_path), asked, recorded, "run-1")


@pytest.mark.parametrize("mixed_precision", ["off", "bfloat16", "float16"])
def test_every_precision_trains_with_float32_weights(tiny_uri, tmp_path, mixed_precision):
    config = {"model": f"{MODELS}:smooth", "mixed_precision": mixed_precision, "epochs": 3, "learning_rate": 0.005}
    result = train_here(tiny_uri, tmp_path, **config)
    assert result.history[-1].train_loss < result.history[0].train_loss
    weights = load_arrays((tmp_path / result.checkpoint / WEIGHTS).read_bytes())
    assert {str(array.dtype) for array in weights} == {"float32"}


def test_gradients_and_their_clipping_know_no_scale(monkeypatch):
    monkeypatch.setenv(STEEPNESS, "0")
    batch, norms, changes = batch_of(SHAPE, num_rows=6), {}, {}
    for precision in ("off", "float16"):
        config = {"optimizer": "sgd", "gradient_clip_norm": 0.5, "momentum": 0.0, "mixed_precision": precision}
        one = learner("torch", f"{MODELS}:Steep", **config)
        before = one.arrays(StatePart.WEIGHTS)
        outcome = one.apply(one.gradients(batch, 6, 1.0), 1.0)
        norms[precision] = outcome.gradient_norm
        changes[precision] = np.concatenate(
            [(after - old).ravel() for old, after in zip(before, one.arrays(StatePart.WEIGHTS), strict=True)]
        )
        assert outcome.is_applied and not outcome.overflowed
    assert norms["off"] > 0.5 and norms["float16"] == pytest.approx(norms["off"], rel=1e-2)
    assert np.linalg.norm(changes["float16"]) == pytest.approx(0.5, rel=1e-3)
    np.testing.assert_allclose(changes["float16"], changes["off"], atol=2e-3)


def test_an_overflow_halves_the_scale_and_nothing_else_until_it_cannot(monkeypatch):
    monkeypatch.setenv(STEEPNESS, "1e7")
    one = learner("torch", f"{MODELS}:Steep", mixed_precision="float16", optimizer="adam")
    batch = batch_of(SHAPE)
    before = [array.tobytes() for array in (*one.arrays(StatePart.WEIGHTS), *one.arrays(StatePart.OPTIMIZER)[:-2])]
    for exponent in range(14, -1, -1):
        outcome = one.apply(one.gradients(batch, 4, 1.0), 0.1)
        assert (outcome.is_applied, outcome.overflowed, scale_of(one)) == (True, True, 2.0**exponent)
        assert np.isfinite(outcome.loss) and not np.isfinite(outcome.gradient_norm)
    outcome = one.apply(one.gradients(batch, 4, 1.0), 0.1)
    assert (outcome.is_applied, outcome.overflowed, scale_of(one)) == (False, False, 1.0)
    after = [array.tobytes() for array in (*one.arrays(StatePart.WEIGHTS), *one.arrays(StatePart.OPTIMIZER)[:-2])]
    assert after == before

    # A loss that is not finite is a fault at any scale, and no reason to lower it.
    with_scale(one, 8.0)
    *gradients, metrics = one.gradients(batch, 4, 1.0)
    outcome = one.apply([*gradients, metrics * float("nan")], 0.1)
    assert (outcome.is_applied, outcome.overflowed, scale_of(one)) == (False, False, 8.0)


def test_the_scale_grows_after_many_updates_and_not_without_end():
    precision = Precision("float16")
    scale, num_updates = precision.state()
    for _ in range(NUM_UPDATES_TO_DOUBLE - 1):
        precision.after_update()
    assert (float(scale), int(num_updates)) == (FIRST_SCALE, NUM_UPDATES_TO_DOUBLE - 1)
    precision.after_update()
    assert (float(scale), int(num_updates)) == (2 * FIRST_SCALE, 0)
    for _ in range(20 * NUM_UPDATES_TO_DOUBLE):
        precision.after_update()
    assert float(scale) == LARGEST_SCALE
    # An overflow breaks the row.
    precision.after_update()
    assert precision.lower() and (float(scale), int(num_updates)) == (LARGEST_SCALE / 2, 0)
    precision.begin()
    assert float(scale) == FIRST_SCALE
    assert Precision("bfloat16").state() == [] and not Precision("bfloat16").lower()


@pytest.fixture(scope="module")
def alone(tiny_uri, tmp_path_factory):
    """A whole training at one rank, and what was seen of it."""
    recorder, folder = Recorder(), tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STEEPNESS, "100")
        return train_here(tiny_uri, folder, recorder, **STEEP), recorder, folder


def test_a_killed_training_continues_with_its_scale(tiny_uri, tmp_path, monkeypatch, alone):
    monkeypatch.setenv(STEEPNESS, "100")
    result, recorder, folder = alone
    assert 2 <= result.num_overflowed_steps <= 9 and result.num_skipped_steps == 0
    assert result.history[-1].train_loss < result.history[0].train_loss
    scale = float(load_arrays((folder / result.last_checkpoint / OPTIMIZER).read_bytes())[-5])
    assert scale == FIRST_SCALE / 2**result.num_overflowed_steps

    # The first overflows are over by then, and a fresh scale would bring them again.
    first, second = Recorder(killed_at=10), Recorder()
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path, first, **STEEP, checkpoint_every_steps=9)
    again = train_here(tiny_uri, tmp_path, second, **STEEP, checkpoint_every_steps=9)
    assert again.resumed_from is not None and first.losses | second.losses == recorder.losses
    assert again.weights_sha256 == result.weights_sha256
    assert again.num_overflowed_steps == result.num_overflowed_steps


def test_gradients_too_large_for_any_scale_are_a_fault(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv(STEEPNESS, "1e8")
    recorder = Recorder()
    with pytest.raises(TrainingError, match=r"gradient norm (inf|nan) .*\(global step 15\); the update was not"):
        train_here(tiny_uri, tmp_path, recorder, **{**STEEP, "non_finite": {"action": "stop"}})
    assert len(recorder.steps) == 15, "half the scale each time, from 2**15 to 1"


@pytest.mark.drill
def test_ranks_agree_on_what_overflowed(tiny_uri, tmp_path, monkeypatch, alone):
    monkeypatch.setenv(STEEPNESS, "100")
    result, recorder, _ = alone
    # The parts of a step are those of one rank: what overflows in float16 depends on them. That all ranks end with the
    # same weights is looked at there.
    config = {**STEEP, "strategy": "torch_ddp", "accumulation_steps": 2}
    several, watched = train_on_ranks(tiny_uri, tmp_path, 2, config)
    assert several.num_overflowed_steps == result.num_overflowed_steps and several.num_skipped_steps == 0
    for step, loss in recorder.losses.items():
        # What ranks round in sixteen bits before it is added up.
        assert float.fromhex(watched.losses[step]) == pytest.approx(float.fromhex(loss), rel=0.02, abs=1e-3)


@pytest.mark.drill
def test_a_keras_model_on_pytorch_trains_in_float16_as_in_float32(tiny_uri, tmp_path):
    config = {"backend": "torch", "model": "small_cnn", "epochs": 2, "learning_rate": 0.01, "accumulation_steps": 2}
    plain = in_own_process("torch", train_here, tiny_uri, tmp_path / "float32", **config)
    half = in_own_process("torch", train_here, tiny_uri, tmp_path / "float16", **config, mixed_precision="float16")
    assert half.num_overflowed_steps <= 2 and half.num_skipped_steps == 0
    assert half.weights_sha256 != plain.weights_sha256
    for one, other in zip(half.history, plain.history, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=0.05)
    assert half.history[-1].train_loss < half.history[0].train_loss


LIMIT = "SHARDMILL_TEST_BRIGHTEST"
NON_FINITE = "tests.train.torch_models"
CONFIG = {"model": f"{NON_FINITE}:Dazzled", "standardize": False, "augment": {"random_crop_padding": 0},
          "non_finite": {"action": "skip"}, "record_samples": True}  # fmt: skip


@pytest.fixture(scope="module")
def by_brightness(tiny_uri) -> list[tuple[float, str]]:
    """(sum of pixels, sample id) of the train split, darkest first."""
    samples = read_samples(open_dataset(tiny_uri), "train", 1000)
    return sorted((float(each.image_HWC.astype(int).sum()), format_sample_id(each.sample_id)) for each in samples)


def test_a_batch_without_a_finite_loss_is_left_out_and_counted(tiny_uri, tmp_path, monkeypatch, by_brightness):
    """The model answers one sample with NaN while it trains, in front of a batch norm."""
    (second, _), (_, name) = by_brightness[-2:]
    monkeypatch.setenv(LIMIT, str(second + 0.5))
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, **CONFIG)
    skipped = [report for report in recorder.steps if not math.isfinite(float.fromhex(report.loss_hex))]
    assert [name in report.sample_ids for report in skipped] == [True] * result.num_epochs
    assert result.num_skipped_steps == len(skipped) and result.num_steps == len(recorder.steps)
    events = recorder.named("step_skipped")
    assert [(each["epoch"], each["step"]) for each in events] == [(report.epoch, report.step) for report in skipped]
    assert ["warning" in each for each in events] == [True] + [False] * (len(events) - 1)
    # Nothing of the batch is left: neither in the weights nor in the moving statistics, nor in the epoch's metrics.
    assert result.evaluation is not None and np.isfinite(result.evaluation.loss)
    assert all(np.isfinite(epoch.train_loss) and 0 <= epoch.train_accuracy <= 1 for epoch in result.history)
    assert np.isfinite(float.fromhex(result.final_loss_hex))


def test_too_many_in_a_row_stop_the_training(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv(LIMIT, "-1")
    recorder, skipping = Recorder(), {"action": "skip", "max_skipped_in_a_row": 2}
    with pytest.raises(TrainingError, match="step 2 .* not applied; .*; as were 2 updates just before it"):
        train_here(tiny_uri, tmp_path, recorder, **{**CONFIG, "non_finite": skipping, "global_batch_size": 16})
    assert len(recorder.named("step_skipped")) == len(recorder.steps) == 2


def test_a_finite_loss_with_a_gradient_without_bounds_stops_before_the_update(tiny_uri, tmp_path):
    """Of every sample: as many are named as of answers."""
    recorder = Recorder()
    first = planned(
        tiny_uri, TrainConfig(strategy="single", num_workers=1, num_streams=8, global_batch_size=32, epochs=1)
    )[0, 0]
    told = (
        r"^loss \d.*, gradient norm inf at epoch 0, step 0 .*; the update was not applied; .* finite for every sample"
        rf"; the gradient of at least 5 samples by itself is not finite: {', '.join(first[:5])};"
    )
    with pytest.raises(TrainingError, match=told):
        train_here(tiny_uri, tmp_path, recorder, model=f"{NON_FINITE}:Cliff")
    assert not recorder.steps


def test_samples_whose_gradient_is_not_finite_are_named_and_left_out(tiny_uri, tmp_path, monkeypatch, by_brightness):
    """Two of them, of which the model's answers are finite; a batch norm's statistics are as if they had not been."""
    monkeypatch.setenv(LIMIT, str(by_brightness[-3][0] + 0.5))
    recorder = Recorder()
    config = {**CONFIG, "model": f"{NON_FINITE}:SteepWhereBright", "epochs": 1, "global_batch_size": 96}
    result = train_here(tiny_uri, tmp_path, recorder, **config)
    [event] = recorder.named("step_skipped")
    ids = [name for name in recorder.steps[0].sample_ids if name in {name for _, name in by_brightness[-2:]}]
    assert len(ids) == 2 and event["warning"].endswith(
        f"the gradient of 2 samples by itself is not finite: {', '.join(ids)}"
    )
    assert result.num_skipped_steps == len(recorder.steps) == 1
    running_mean, running_var, num_batches, *_ = load_arrays((tmp_path / result.checkpoint / rank_file(0)).read_bytes())
    assert not running_mean.any() and (running_var == 1).all() and num_batches == 0


@pytest.mark.drill
def test_all_ranks_leave_out_a_batch_and_stop_before_the_same_update(tiny_uri, tmp_path, monkeypatch, by_brightness):
    """Of the samples of a step one rank has the one that is too bright, and the other rank learns of it by the sum."""
    config = {**CONFIG, "model": f"{NON_FINITE}:Blinded", "strategy": f"{WORKERS}:REMEMBERED_TORCH_DDP",
              "num_workers": 2, "launcher": "local", "global_batch_size": 8, "checkpoint_every_steps": 1,
              "non_finite": {"action": "skip", "max_skipped_in_a_row": 1}}  # fmt: skip
    brightness_of = {name: brightness for brightness, name in by_brightness}
    steps = list(planned(tiny_uri, TrainConfig(**config, epochs=1)).values())
    brightest = [max(brightness_of[name] for name in names) for names in steps]
    # Two steps in a row have a sample that is as bright, and no two before them.
    stopped_at, limit = max(enumerate(map(min, brightest[1:], brightest[2:]), start=2), key=lambda each: each[1])
    limit -= 0.5
    skipped = [step for step in range(stopped_at) if brightest[step] > limit]
    assert skipped[-1] == stopped_at - 1 and min(brightest[:2]) <= limit
    monkeypatch.setenv(LIMIT, str(limit))
    bad = [name for name in steps[stopped_at] if brightness_of[name] > limit]
    said = rf"\(global step {stopped_at}\); the update was not applied; .* {len(bad)} samples: {', '.join(bad)};"
    watcher = Watcher()
    with pytest.raises(TrainingError, match=said):
        worker = f"{WORKERS}:every_rank_reports_what_a_failure_leaves"
        launch_forked(task_of(tiny_uri, tmp_path, **config), watcher, worker)
    # The step that stopped it is not reported.
    assert [step for step, loss in enumerate(watcher.losses.values()) if loss == "nan"] == skipped
    assert len(watcher.losses) == stopped_at and watcher.names.count("step_skipped") == len(skipped)
    # Nothing has changed since the step before it, of which no update was applied either.
    newest = next(complete_checkpoints(open_store(tmp_path), "t"))
    assert newest.marker.global_step >= stopped_at - 1
    expected = load_arrays((tmp_path / newest.path / WEIGHTS).read_bytes())
    for rank in range(2):
        left = load_arrays((tmp_path / "left" / f"rank-{rank}.npz").read_bytes())
        assert [array.tobytes() for array in left] == [array.tobytes() for array in expected]


@pytest.mark.parametrize(
    ("strategy", "num_workers"),
    [pytest.param("single", 1, marks=pytest.mark.starts("ranks")), exhaustive("horovod", 2)],
)
def test_a_keras_model_is_as_if_a_batch_had_not_been(
    tiny_uri, tmp_path, monkeypatch, by_brightness, strategy, num_workers
):
    """Of two ranks one has the sample; the moving statistics of a batch norm are as they were on both."""
    monkeypatch.setenv(LIMIT, str(by_brightness[-2][0] + 0.5))
    config = {**CONFIG, "model": "tests.train.models_under_test:steep_behind_norm", "epochs": 1,
              "global_batch_size": 96, "strategy": strategy, "num_workers": num_workers,
              "launcher": "local"}  # fmt: skip
    watcher = Watcher()
    result = launch_forked(task_of(tiny_uri, tmp_path, **config), watcher)
    assert result.num_skipped_steps == result.num_steps == 1 and watcher.names.count("step_skipped") == 1
    for rank in range(num_workers):
        moving_mean, moving_variance, *_ = load_arrays((tmp_path / result.checkpoint / rank_file(rank)).read_bytes())
        assert not moving_mean.any() and (moving_variance == 1).all()


# On two ranks, or two devices: the rank or device without the sample learns of it by the sum.
ON_TWO: dict[str, dict] = {
    "horovod": {"num_workers": 2},
    "multi_worker_mirrored": {"num_workers": 2},
    "mirrored": {"mirrored": {"num_devices": 2}},
    "torch_ddp": {"num_workers": 2, "model": f"{NON_FINITE}:SteepWhereBright"},
    "zero1": {"num_workers": 2, "model": f"{NON_FINITE}:SteepWhereBright"},
    "torch_fsdp": {"num_workers": 2, "model": f"{NON_FINITE}:SteepWhereBright"},
    "tensor_parallel": {"num_workers": 2, "model": f"{NON_FINITE}:SteepWhereBright"},
    "hybrid": {"num_workers": 2, "model": f"{NON_FINITE}:SteepWhereBright"},
    "pipeline_parallel": {"num_workers": 2, "model": f"{NON_FINITE}:steep_chain"},
    "local_sgd": {"num_workers": 2, "local_sgd": {"local_steps": 2}},
    "parameter_server": {"num_workers": 2, "parameter_server": {"num_servers": 1}},
}


def weights_of_rank(checkpoint: Path, rank: int) -> list[np.ndarray]:
    """What a rank holds of the weights in a checkpoint of either layout."""
    if (checkpoint / WEIGHTS).exists():
        return load_arrays((checkpoint / WEIGHTS).read_bytes())
    index = read_index(lambda name: (checkpoint / name).read_bytes())
    wanted = [shard for shard in index.of_ranks[rank] if shard.part == WEIGHTS_PART]
    return index.assemble(wanted, {name: (checkpoint / name).read_bytes() for name in index.files_with(wanted)}, "it")


def test_every_strategy_of_several_is_stopped_by_a_gradient():
    assert set(ON_TWO) == set(STRATEGIES) - {"single"}


@pytest.mark.drill
@pytest.mark.parametrize(
    "strategy",
    usually_of({"horovod", "torch_fsdp", "parameter_server"}, ON_TWO),
)
def test_a_gradient_without_bounds_stops_all_ranks_and_its_sample_is_named(
    tiny_uri, tmp_path, monkeypatch, by_brightness, strategy
):
    """Synchronous ranks have the weights that they had before the step; others have at least saved none of later."""
    is_synchronous = STRATEGIES[strategy].synchronous
    config = {"model": "tests.train.models_under_test:steep", "standardize": False, "launcher": "local",
              "augment": {"random_crop_padding": 0}, "global_batch_size": 8, "checkpoint_every_steps": 1, "epochs": 1,
              **ON_TWO[strategy], "strategy": strategy}  # fmt: skip
    (second, _), (_, name) = by_brightness[-2:]
    [stopped_at] = [step for (_, step), names in planned(tiny_uri, TrainConfig(**config)).items() if name in names]
    assert stopped_at > 0
    monkeypatch.setenv(LIMIT, str(second + 0.5))
    if is_synchronous:
        config["strategy"] = f"{WORKERS}:REMEMBERED_{strategy.upper()}"
    worker = f"{WORKERS}:every_rank_reports_what_a_failure_leaves" if is_synchronous else DEFAULT_WORKER
    said = (
        rf"\(global step {stopped_at}\); the update was not applied; .* finite for every sample; "
        rf"the gradient of 1 sample by itself is not finite: {name};"
    )
    watcher = Watcher()
    with pytest.raises(TrainingError, match=said):
        launch_forked(task_of(tiny_uri, tmp_path, **config), watcher, worker)
    assert list(watcher.losses) == [(0, step) for step in range(stopped_at)]
    newest = next(complete_checkpoints(open_store(tmp_path), "t"))
    saved = [weights_of_rank(tmp_path / newest.path, rank) for rank in range(config.get("num_workers", 1))]
    assert all(np.isfinite(array).all() for of_rank in saved for array in of_rank)
    if not is_synchronous:
        # The last one may have been under way.
        assert newest.marker.global_step in (stopped_at - 1, stopped_at)
        return
    assert newest.marker.global_step == stopped_at
    for rank in range(config.get("num_workers", 1)):
        left = load_arrays((tmp_path / "left" / f"rank-{rank}.npz").read_bytes())
        assert [array.tobytes() for array in left] == [array.tobytes() for array in saved[rank]]


SHARDED = {"model": "tests.train.torch_models:tiny_vit", "num_streams": 12, "global_batch_size": 24, "epochs": 1}


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    "strategy",
    usually_of({"hybrid", "pipeline_parallel"}, strategies_that_share()),
)
def test_a_rank_that_waits_for_a_late_one_says_so_and_bytes_are_counted_once(tiny_uri, tmp_path, strategy):
    seen = DriverRecorder()
    task = task_of(tiny_uri, tmp_path, num_workers=2, launcher="local", **{**SHARDED, "strategy": strategy})
    result = launch_forked(task, seen, "tests.train.multi_rank_workers:last_rank_is_late")
    # A busy machine makes one early step late; not half of them.
    waits = [step.reports[0].seconds["allreduce"] for step in seen.steps[1:]]
    assert statistics.median(waits) > 0.8 * LATE_SECONDS, waits
    for step in seen.steps[1:]:
        early, late = (report.seconds for report in step.reports)
        assert early["compute"] >= 0 and late["compute"] > LATE_SECONDS
    assert result.time_shares.allreduce > 0
    [moved] = seen.named("collectives")
    index = read_index(lambda file: (tmp_path / result.checkpoint / file).read_bytes())
    weight_bytes = 4 * sum(math.prod(shard.shape) for shard in index.whole(WEIGHTS_PART))
    if strategy == "torch_fsdp":
        # The last weights that were gathered are kept for the backward pass.
        assert weight_bytes < moved["all_gather_bytes"] <= 2.1 * weight_bytes
        assert weight_bytes <= moved["reduce_scatter_bytes"] <= 1.1 * weight_bytes
    if strategy == "zero1":
        assert weight_bytes <= moved["all_reduce_bytes"] < 1.1 * weight_bytes
        assert 0.9 * weight_bytes < moved["all_gather_bytes"] < 1.2 * weight_bytes
    if strategy == "tensor_parallel":
        # 24 rows of 64 tokens of 32 numbers, twice in each direction of both blocks; and the norm of the gradients.
        assert 0 <= moved["all_reduce_bytes"] - 2 * 4 * (4 * 24 * 64 * 32) < 100
        assert moved["num_calls"] < 12


def test_functions_that_wait_are_put_back():
    from torch import distributed as dist

    from train.backends.torch.collectives import blocked

    before = dist.Work.wait
    with pytest.raises(ZeroDivisionError), blocked() as found:
        assert dist.Work.wait is not before
        raise ZeroDivisionError
    assert dist.Work.wait is before and found.seconds == 0.0
