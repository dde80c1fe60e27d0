"""The promises that only real ranks can break: equal bits in every run, exact resume, and compressed gradients."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import replace

import pytest

from shardmill.errors import TrainingError
from shardmill.jobs.config import SparkConfig
from shardmill.stores import open_store
from tests.lab.scale import exhaustive
from tests.train.forked_ranks import launch_forked
from tests.train.ranks import (
    LONG,
    OF_STRATEGY,
    SMOOTH_MODEL,
    TORCH_MODELS,
    WORKERS,
    Watcher,
    files_of_checkpoint,
    kill_on_ranks,
    stateful,
    train_on_ranks,
    usually_of,
)
from tests.train.training import Recorder, task_of, train_here
from train.api import all_members
from train.checkpoints.arrays import MARKER, rank_file
from train.checkpoints.shards import WEIGHTS_PART, shard_file
from train.launching import LAUNCHERS
from train.metrics.evaluate import read_confusion
from train.strategies import STRATEGIES

# Whose ranks all run the loop; the others have tests of their own (test_parameter_server.py).
OF_EQUALS = [
    name for name, each in STRATEGIES.installed().items() if each.roles is all_members and each.allows_world_size(2)
]
EXACT = [name for name, strategy in STRATEGIES.installed().items() if strategy.exact_resume]
# Three: with two ranks a sum has one order only. Of two axes, three ranks would leave one undivided.
RANKS = {name: 4 if len(STRATEGIES[name].axes) > 1 else 3 for name in EXACT}
# local_sgd meets by the collectives of horovod and torch_ddp.
WITH_A_MEETING_OF_THEIR_OWN = [
    name for name, strategy in STRATEGIES.installed().items() if strategy.synchronous and strategy.allows_world_size(2)
]


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("strategy", usually_of({"single", "horovod", "torch_ddp"}, EXACT))
def test_a_killed_process_resumes_exactly(tiny_uri, tmp_path, strategy):
    recorder, resumed = Recorder(), Recorder()
    config = stateful(strategy)
    fresh = train_here(tiny_uri, tmp_path / "fresh", recorder, **config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", 1, config, killed_at=7)
    result = train_here(tiny_uri, tmp_path / "killed", resumed, **config)
    assert result.weights_sha256 == fresh.weights_sha256
    assert result.resumed_from is not None
    assert killed.losses | resumed.losses == recorder.losses


@pytest.mark.drill
@pytest.mark.parametrize(
    "strategy",
    usually_of(
        {"horovod", "torch_ddp", "hybrid"},
        [name for name, ranks in RANKS.items() if STRATEGIES[name].allows_world_size(ranks)],
    ),
)
def test_ranks_with_state_of_their_own_resume_exactly(tiny_uri, tmp_path, strategy):
    """And from one checkpoint back, all together, if one rank cannot read its own file of the newest."""
    config, world_size = stateful(strategy), RANKS[strategy]
    fresh, undisturbed = train_on_ranks(tiny_uri, tmp_path / "fresh", world_size, config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", world_size, config, killed_at=9)
    expected = files_of_checkpoint(
        task_of(tiny_uri, tmp_path, num_workers=world_size, launcher="local", **config).config
    )
    of_rank_1 = min(expected & {rank_file(1), shard_file(WEIGHTS_PART, 1)}, key=len)
    damaged = sorted((tmp_path / "killed").glob(f"t/checkpoints/*/{MARKER}"))[-1].with_name(of_rank_1)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    resumed_result, resumed = train_on_ranks(tiny_uri, tmp_path / "killed", world_size, config)

    assert {place for place in undisturbed.losses if place < (2, 0)} <= killed.before_checkpoint
    assert {"checkpoint_discarded", "resumed"} <= set(resumed.names)
    # In the middle of an epoch.
    assert (resumed_result.resumed_from.epoch, resumed_result.resumed_from.step) == (1, 2)
    assert len(killed.losses.keys() & resumed.losses.keys()) == 3
    for part in (killed, resumed):
        assert part.losses.items() <= undisturbed.losses.items(), "several processes' runs agree bit for bit"
        assert part.sample_ids.items() <= undisturbed.sample_ids.items()
    assert killed.losses.keys() | resumed.losses.keys() == undisturbed.losses.keys()
    assert resumed_result.weights_sha256 == fresh.weights_sha256
    assert resumed_result.evaluation == fresh.evaluation
    files = {file.name for file in (tmp_path / "killed" / resumed_result.checkpoint).iterdir()}
    assert files == expected


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("strategy", usually_of({"local_sgd"}, OF_EQUALS))
def test_evaluation_on_ranks_is_that_of_one(tiny_uri, tmp_path, strategy):
    """Nothing to train is left, so the ranks only load the same weights and evaluate."""
    model = (
        f"{TORCH_MODELS}:smooth"
        if STRATEGIES[strategy].needs_module
        else SMOOTH_MODEL[STRATEGIES[strategy].backends[0]]
    )
    config = {**LONG, **OF_STRATEGY.get(strategy, {}), "strategy": strategy, "model": model, "epochs": 1}
    # Only a synchronous one may go on with what another has trained.
    alone = "single" if STRATEGIES[strategy].synchronous else strategy
    one = train_here(tiny_uri, tmp_path, **{**config, "strategy": alone})
    (tmp_path / "t" / "result.json").unlink()
    confusion = read_confusion(open_store(str(tmp_path)), "t")
    (tmp_path / "t" / "confusion.json").unlink()
    result, watcher = train_on_ranks(tiny_uri, tmp_path, 2, config)
    assert not watcher.losses
    # A classifier of three classes, a quarter of the weights, is all that two ranks can divide.
    assert ("little_divided" in watcher.names) == ("tensor" in STRATEGIES[strategy].axes)
    assert result.weights_sha256 == one.weights_sha256
    assert result.evaluation.per_class == one.evaluation.per_class
    found = read_confusion(open_store(str(tmp_path)), "t")
    assert found is not None and confusion is not None
    assert replace(found, mistakes=()) == replace(confusion, mistakes=())
    both = [sorted((each.sample_id, each.predicted) for each in which.mistakes) for which in (found, confusion)]
    assert both[0] == both[1]
    assert result.evaluation.top5_accuracy == one.evaluation.top5_accuracy
    assert result.evaluation.loss == pytest.approx(one.evaluation.loss, rel=1e-6)


@pytest.mark.drill
@pytest.mark.parametrize("strategy", usually_of({"horovod", "torch_fsdp"}, EXACT))
def test_every_strategy_trains_in_a_barrier_stage_as_it_does_in_processes_here(tiny_uri, tmp_path, strategy):
    world_size = 2 if STRATEGIES[strategy].allows_world_size(2) else 1
    config = stateful(strategy) | ({"mirrored": {"num_devices": 2}} if strategy == "mirrored" else {})
    here, _ = train_on_ranks(tiny_uri, tmp_path / "here", world_size, config)
    task = task_of(tiny_uri, tmp_path / "spark", launcher="spark_barrier", num_workers=world_size, **config)
    watcher = Watcher()
    result = LAUNCHERS["spark_barrier"].launch(task, SparkConfig(master="local[2]"), watcher)
    assert (result.weights_sha256, result.final_loss_hex) == (here.weights_sha256, here.final_loss_hex)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("strategy", "worker"),
    [
        ("horovod", "last_rank_stalls"),
        ("torch_fsdp", "last_rank_stalls"),
        ("torch_ddp", "last_rank_reads_nothing"),
        *(
            exhaustive(name, "last_rank_stalls")
            for name in WITH_A_MEETING_OF_THEIR_OWN
            if name not in ("horovod", "torch_fsdp")
        ),
    ],
)
def test_the_rank_that_stands_still_is_named_and_not_the_one_that_waits_for_it(tiny_uri, tmp_path, strategy, worker):
    limits = {"progress_timeout_seconds": 10, "start_timeout_seconds": 120}
    task = task_of(tiny_uri, tmp_path, **stateful(strategy), num_workers=2, launcher="local", watch=limits)
    with pytest.raises(TrainingError, match=r"^rank 1 .* hangs .* rank 0 waiting in an? (allreduce|gather)"):
        launch_forked(task, Watcher(), f"{WORKERS}:{worker}")


# Momentum alone: Adam would blow the rounding of small gradients up.
CONFIG = {"num_streams": 4, "global_batch_size": 24, "epochs": 4, "optimizer": "sgd", "learning_rate": 0.02,
          "label_smoothing": 0.1}  # fmt: skip
USUAL = {("horovod", "fp16"), ("torch_ddp", "bf16")}
COMPRESSED = [
    (name, each) if (name, each) in USUAL else exhaustive(name, each)
    for name, strategy in STRATEGIES.installed().items()
    for each in strategy.compressions
    if each != "none"
]


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(("strategy", "compression"), COMPRESSED)
def test_compressed_gradients_train_as_others_do(tiny_uri, tmp_path, strategy, compression):
    """In small buckets too. The first loss is that of one rank alone, because no gradient has been used yet."""
    model = SMOOTH_MODEL[STRATEGIES[strategy].backends[0]]
    one = Recorder()
    alone = train_here(tiny_uri, tmp_path / "one", one, **CONFIG, model=model)
    config = {**CONFIG, "model": model, "strategy": strategy, "compression": compression, "bucket_bytes": 20_000}
    result, watched = train_on_ranks(tiny_uri, tmp_path / "several", 2, config)
    losses = [(float.fromhex(watched.losses[step]), float.fromhex(loss)) for step, loss in one.losses.items()]
    assert losses[0][0] == pytest.approx(losses[0][1], rel=1e-6)
    differences = [abs(found - expected) / expected for found, expected in losses]
    # One that did nothing, or nothing but harm, would show here.
    assert 1e-6 < max(differences) < 0.05, differences
    assert result.evaluation is not None and alone.evaluation is not None
    assert result.evaluation.accuracy >= alone.evaluation.accuracy - 0.1
