"""What a resume keeps, what it may change, and what is refused with each difference."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from etl.config import EtlConfig
from pipeline.cli import app
from pipeline.config_file import to_toml
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.maintenance.gc import Retention, collect_garbage
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.epoch_plan import num_streams_for, streams_of_rank
from shardmill.errors import CommitConflict, IntegrityError, TrainingError, UsageError
from shardmill.jobs.config import DatasetConfig, ModelsConfig, SparkApplicationConfig, SparkConfig
from shardmill.jobs.process import start_of_process
from shardmill.stores import open_store
from shardmill.values import Cursor
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.shardmill.collecting import build, gc_now, with_images
from tests.train.training import ETL, ONE_LAYER, DriverRecorder, Killed, tree_of
from train.checkpoints.checkpoint import AttemptRecord
from train.config import TrainConfig
from train.identity import fields_of_settings, settings_of
from train.planning.plan import TrainingPlan, keep_plan
from train.planning.resume import BegunTraining, ResumePolicy, check_allowed
from train.planning.setup import Facts, Setup, choose_ranks, resolve
from train.planning.trainings import PLAN, as_begun, read_plan
from train.records import put_record, read_record, record_numbers
from train.settings import DURATION, EXECUTION, RESUMABLE
from train.stage_record import train_record
from train.strategies.options import MirroredOptions
from train.training import finished_training, train_model
from train.tree import TrainTree


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """begun(folder) -> a dataset's URI, its models and the run's file, in `folder`: stopped after 7 of 8 steps."""
    made = tmp_path_factory.mktemp("begun")
    uri = make_dataset(made)
    with pytest.raises(TrainingError, match="stopped here"):
        train_model(
            tree_of(uri, made / "models"), DriverRecorder(fail_after_steps=7), again=ResumePolicy(begun=file_of(made))
        )

    def copy(folder: Path) -> Path:
        shutil.copytree(made / "models", folder / "models")
        shutil.copy(made / "training.begun", folder)
        # The run's file names the models' root.
        text = (folder / "training.begun").read_text().replace(str(made), str(folder))
        (folder / "training.begun").write_text(text)
        return folder

    return uri, made, copy


def file_of(folder: Path) -> BegunTraining:
    return BegunTraining(open_store(folder), "training.begun")


def train(uri: str, folder: Path, recorder: DriverRecorder | None = None, *, allow_change=(), is_run=True, **settings):
    again = ResumePolicy(allow_change=tuple(allow_change), begun=file_of(folder) if is_run else None)
    return train_model(tree_of(uri, folder / "models", **settings), recorder or DriverRecorder(), again=again)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 1}, ["train.seed: then 0, now 1"]),
        ({"global_batch_size": 30, "optimizer": "sgd"}, [
            "train.global_batch_size: then 24, now 30", 'train.optimizer: then "auto", now "sgd"',
        ]),
        ({"model": "resnet50"}, [f'train.model: then "{ONE_LAYER}", now "resnet50"']),
        ({"learning_rate": 0.01, "seed": 2}, ["train.learning_rate: then 0.001, now 0.01", "train.seed: then 0, now"]),
    ],
)  # fmt: skip
def test_the_same_run_with_other_settings_is_refused_with_each_difference(begun, tmp_path, settings, said):
    uri, _, copy = begun
    recorder = DriverRecorder()
    with pytest.raises(UsageError) as caught:
        train(uri, copy(tmp_path), recorder, **settings)
    assert all(part in caught.value.what for part in said), caught.value
    assert "--fresh" in caught.value.fix and "--allow-change" not in caught.value.fix
    assert recorder.steps == []


def test_a_safe_change_continues_where_it_is_allowed_and_nowhere_else(begun, tmp_path):
    uri, _, copy = begun
    folder = copy(tmp_path)
    with pytest.raises(UsageError, match="resume from its last checkpoint with --allow-change learning_rate"):
        train(uri, folder, learning_rate=0.01)
    with pytest.raises(UsageError, match="train.seed: then 0, now 1"):
        train(uri, folder, learning_rate=0.01, seed=1, allow_change=["learning_rate"])
    recorder = DriverRecorder()
    result = train(uri, folder, recorder, learning_rate=0.01, allow_change=["train.learning_rate"]).result
    assert recorder.named("changed")[-1]["changes"] == "train.learning_rate: then 0.001, now 0.01"
    assert result.resumed_from == Cursor(1, 2)
    assert next(iter(recorder.losses)) == (1, 2) and result.num_epochs == 2
    # It is a training of its own now: the same command finds it done, and the older one can still go on.
    assert train(uri, folder, learning_rate=0.01, allow_change=["learning_rate"]).skipped
    assert not train(uri, folder, is_run=False).skipped


def test_another_run_starts_anew_unless_it_asks_to_continue(begun, tmp_path):
    uri, _, copy = begun
    folder = copy(tmp_path)
    # A longer one of other settings, from the middle of the shorter.
    recorder = DriverRecorder()
    changes = {"label_smoothing": 0.1, "epochs": 3}
    result = train(uri, folder, recorder, is_run=False, allow_change=["label_smoothing,epochs"], **changes).result
    assert next(iter(recorder.losses)) == (1, 2) and result.num_epochs == 3
    anew = DriverRecorder()
    own = {"model": "tests.train.models_under_test:stateful", "freeze": ("all_but_head",), "unfreeze_epoch": 1}
    train(uri, folder, anew, is_run=False, epochs=1, **own)
    assert next(iter(anew.losses)) == (0, 0)
    assert "the weights that train.freeze names stay frozen" in anew.named("freeze")[-1]["warning"]
    with pytest.raises(
        UsageError, match="differs only in these settings; the nearest, trainings/.*train.seed: then 0, now 5"
    ):
        train(uri, folder, is_run=False, seed=5, allow_change=["learning_rate"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"epochs": 3},
            "then 2, now 3; to continue that one, resume from its last checkpoint with --allow-change epochs; or",
        ),
        (
            {"seed": 1, "learning_rate": 0.01},
            "now 0.01; train.seed: then 0, now 1; to continue that one, restore these",
        ),
    ],
)
def test_a_new_training_names_the_unfinished_one_that_it_leaves(begun, tmp_path, settings, said):
    uri, _, copy = begun
    recorder = DriverRecorder(fail_after_steps=1)
    with pytest.raises(TrainingError, match="stopped here"):
        train(uri, copy(tmp_path), recorder, is_run=False, **settings)
    [told] = recorder.named("other_unfinished")
    assert (
        "an unfinished training of this dataset, at epoch 2, step 3," in told["warning"] and said in told["warning"]
    ), told
    # The same training again leaves nothing.
    again = DriverRecorder()
    train(uri, tmp_path, again, is_run=False)
    assert again.named("other_unfinished") == []


@pytest.mark.parametrize(
    ("other", "refusal"),
    [
        ({}, f"process {os.getppid()} of this host trains in .*/trainings/.*, since 20.*end its command"),
        # A process that is gone has given its number to this one; of another host nobody knows whether it lives.
        ({"started": "before the boot"}, ""),
        ({"host": "elsewhere"}, ""),
    ],
    ids=["lives here", "gone", "elsewhere"],
)
def test_a_training_is_left_to_a_process_of_this_host_that_is_at_work_on_it(begun, tmp_path, other, refusal):
    uri, _, copy = begun
    copy(tmp_path)
    store = open_store(tmp_path / "models")
    [folder] = {file.path.rpartition("/")[0] for file in store.list("trainings") if "/attempts/" in file.path}
    own = read_record(store, folder, 1, AttemptRecord)
    assert (own.process, own.started) == (os.getpid(), start_of_process(os.getpid()))
    parent = {"process": os.getppid(), "started": start_of_process(os.getppid())}
    put_record(store, folder, 2, own.model_copy(update={**parent, **other}))
    if refusal:
        with pytest.raises(CommitConflict, match=refusal):
            train(uri, tmp_path)
    else:
        assert train(uri, tmp_path).result.num_epochs == 2
    assert record_numbers(store, folder) == ([1, 2] if refusal else [1, 2, 3])


def test_the_command_continues_where_a_change_is_allowed(begun, tmp_path):
    uri, _, copy = begun
    settings = {"model": ONE_LAYER, "epochs": 2, "global_batch_size": 24, "num_streams": 6, "checkpoint_every_steps": 2}
    sets = [f"--set=train.{name}={value}" for name, value in {**settings, "learning_rate": 0.01}.items()]
    sets += [f"--set=models.uri={copy(tmp_path)}/models", f"--workdir={tmp_path}/work", "--json"]

    def invoke(*options: str) -> Result:
        return CliRunner().invoke(app, ["train", uri, *sets, *options])

    refused = invoke("--allow-change", "seed")
    assert refused.exit_code == 2 and "--allow-change seed" in refused.stderr, refused.output
    document = json.loads(invoke("--allow-change", "learning_rate").stdout)
    assert document["sections"]["train"]["resumed_from"] == {"epoch": 1, "step": 2}


def test_a_run_on_another_version_of_its_dataset_is_refused(tmp_path):
    uri = make_dataset(tmp_path)
    with pytest.raises(TrainingError, match="stopped here"):
        train(uri, tmp_path, DriverRecorder(fail_after_steps=3))
    write_images(tmp_path / "images", num_images=180)
    build_here(str(tmp_path / "images"), uri, ETL)
    assert open_dataset(uri).pin.version == 2
    with pytest.raises(UsageError, match="dataset: then version 1, now version 2"):
        train(uri, tmp_path)
    assert train(f"{uri}@1", tmp_path).result.dataset.version == 1


def test_only_settings_that_are_declared_safe_can_be_allowed():
    assert check_allowed(["learning_rate,train.schedule", "epochs"]) == ("learning_rate", "schedule", "epochs")
    for name, said in (("seed", "is not safe to change"), ("sead", "is not a key of")):
        with pytest.raises(UsageError, match=rf"--allow-change {name}: it {said}.*augment, class_weights, early_stop"):
            check_allowed([name])
    # Those without a meaning make another training, and none of the data's or model's is safe.
    assert not settings_of(RESUMABLE) & (settings_of(EXECUTION) | settings_of(DURATION))
    decisive = {"model", "global_batch_size", "seed", "num_streams", "standardize", "optimizer"}
    decisive |= {"reading.window_budget_bytes"}
    assert not decisive & settings_of(RESUMABLE) and decisive <= fields_of_settings().keys()


HERE = SparkConfig(master="local[2]")
TWO = TrainConfig(num_workers=2)
ANY = TrainConfig()


@pytest.fixture
def begun_by(tiny_uri, tmp_path, choice_of):
    """begun(setup, asked, spark) -> the setup of a resume that asks so, after a training was begun by `setup`."""
    _, _, choice, store = choice_of(tmp_path, tree_of(tiny_uri, tmp_path, num_workers=2))

    def again(begun: Setup, asked: TrainConfig = TWO, spark: SparkConfig = HERE) -> Setup:
        keep_plan(store, choice.training_dir, TrainingPlan(begun))
        return as_begun(resolve(asked, spark), read_plan(store, choice.folders))

    return again


def chosen_elsewhere() -> Setup:
    """On a machine without Horovod, which is here."""
    now = resolve(TWO, HERE)
    assert now.config.strategy == "horovod"
    return now.changed(
        {"strategy_reason": "2 TensorFlow workers, and Horovod is not installed"}, strategy="multi_worker_mirrored"
    )


@pytest.mark.needs("horovod")
def test_a_resume_continues_with_what_was_chosen(begun_by):
    found = begun_by(chosen_elsewhere())
    assert found.config.strategy == "multi_worker_mirrored"
    assert "as when this training began (2 TensorFlow workers, and Horovod is not installed)" in found.reason
    # Its reason does not grow from resume to resume.
    assert begun_by(found) == found


@pytest.mark.needs("horovod")
def test_a_longer_training_continues_with_the_choice_of_the_shorter_one(tiny_uri, tmp_path, choice_of, whole):
    _, _, shorter, store = choice_of(tmp_path, tree_of(tiny_uri, tmp_path))
    keep_plan(store, shorter.training_dir, TrainingPlan(chosen_elsewhere()))
    longer = replace(shorter, training_dir="longer", continues=replace(whole, training_dir=shorter.training_dir))
    kept = read_plan(store, longer.folders)
    assert kept is not None and kept.strategy == "multi_worker_mirrored"
    # With a record of its own: the shorter one may be collected.
    keep_plan(store, longer.training_dir, TrainingPlan(chosen_elsewhere()))
    assert read_plan(store, [longer.training_dir]) == kept
    assert read_plan(store, ["other"]) is None


@pytest.mark.parametrize(
    ("asked", "spark", "strategy", "launcher"),
    [
        (TWO.model_copy(update={"strategy": "horovod"}), HERE, "horovod", "local"),
        (TWO.model_copy(update={"num_workers": 3}), HERE, "horovod", "local"),
        (TWO, SparkConfig(master="yarn"), "multi_worker_mirrored", "spark_barrier"),
    ],
    ids=["set by hand", "other workers", "another place"],
)
def test_another_question_gets_another_answer(begun_by, asked, spark, strategy, launcher):
    found = begun_by(chosen_elsewhere(), asked, spark)
    assert (found.config.strategy, found.config.launcher) == (strategy, launcher)


@pytest.mark.needs("horovod")
def test_ranks_that_were_chosen_stay_until_they_are_set_or_run_elsewhere(begun_by):
    kept = replace(chosen_elsewhere(), ranks_reason="this machine has 2 GPUs")
    alone = resolve(ANY, HERE).config
    assert (alone.num_workers, alone.strategy, alone.launcher) == (1, "single", "inline")
    found = begun_by(kept, ANY)
    assert (found.config.num_workers, found.config.strategy) == (2, "multi_worker_mirrored")
    assert found.reason.startswith("2 ranks: as when this training began (this machine has 2 GPUs); multi_worker_mirr")
    assert begun_by(kept, ANY.model_copy(update={"num_workers": 1})).config.strategy == "single"
    assert begun_by(kept, ANY, SparkConfig(master="local[3]")).config == alone
    # The one process of `inline` is set, so that two ranks cannot go on.
    found = begun_by(kept, ANY.model_copy(update={"launcher": "inline"}))
    assert found.config.num_workers == 1 and "began with 2 ranks" in found.chosen_anew


@pytest.mark.needs("horovod")
def test_a_plan_that_no_longer_runs_is_replaced_with_a_message(begun_by):
    found = begun_by(chosen_elsewhere(), TWO.model_copy(update={"compression": "fp16"}))
    assert found.config.strategy == "horovod"
    said = found.chosen_anew
    assert "began with 2 ranks, multi_worker_mirrored (local), which cannot run now: train.compression" in said


def test_a_training_keeps_its_choice_and_an_altered_one_is_refused(tiny_uri, tmp_path):
    tree = tree_of(tiny_uri, tmp_path / "models", epochs=1)
    with pytest.raises(TrainingError, match="stopped here"):
        train_model(tree, DriverRecorder(fail_after_steps=1))
    [path] = (tmp_path / "models").rglob(PLAN)
    kept = path.read_bytes()
    assert b'"strategy":"single"' in kept and b'"strategy_reason":"one worker"' in kept
    path.write_bytes(kept.replace(b"single", b"double"))
    with pytest.raises(IntegrityError, match=f"{PLAN} was altered; .*; delete it: `auto` is then resolved again"):
        train_model(tree, DriverRecorder())
    path.write_bytes(kept)
    outcome = train_model(tree, DriverRecorder())
    assert path.read_bytes() == kept
    reason = train_record(outcome).sections["train"]["strategy_reason"]
    assert "all devices of this machine; single: one worker; inline: in this process (" in reason
    # One paragraph with what was looked at.
    assert re.search(
        r"\(no GPU and \d+ processors here; one host, because spark.master = local\[\*\] names no cluster; \d+ rows to",
        reason,
    )
    assert re.search(
        r"train on: \d+ steps of \d+ images an epoch, \d+ in all\); trained weights take [\d.]+ KiB", reason
    )
    assert re.search("KiB with the optimizer's state; a rank may use [\\d.]+ GiB \\(", reason)
    memory = train_record(outcome).sections["train"]["memory"]
    assert re.fullmatch(
        "memory: the \\d+ images of a step take .*: .* GiB \\(.*\\) hold more than 1,000 times as much", memory
    )


def test_the_reason_has_the_numbers_that_were_looked_at(tiny_uri):
    dataset = open_dataset(tiny_uri)
    config = TrainConfig(epochs=1000, global_batch_size=32)
    num_rows = dataset.manifest.splits["train"].num_rows
    steps = f"{num_rows} rows to train on: {-(-num_rows // 32)} steps of 32 images an epoch, "
    assert steps in resolve(config, SparkConfig(), dataset).reason
    two = config.with_options(MirroredOptions(num_devices=2))
    assert "(2 device(s) and " in resolve(two, SparkConfig(), dataset).reason
    places = {"spark.executor.instances": "4", "spark.executor.cores": "1"}
    yarn = SparkConfig(master="yarn", train=SparkApplicationConfig(conf=places))
    assert "; spark.master = yarn with slots for 4 ranks; " in resolve(config, yarn, dataset).reason
    everything_set = TrainConfig(num_workers=1, strategy="single", launcher="inline")
    assert resolve(everything_set, SparkConfig(), dataset).numbers == ()


def test_an_expiry_or_a_rollback_is_no_reason_to_train_again(tmp_path: Path):
    def tree(dataset_uri: str) -> TrainTree:
        return TrainTree(dataset=DatasetConfig(uri=dataset_uri), models=ModelsConfig(uri=str(tmp_path / "models")),
                         train=TrainConfig(epochs=1, global_batch_size=6, num_streams=6))  # fmt: skip

    build(with_images(tmp_path), 16)
    root = build(tmp_path, 20)
    trained = train_model(tree(root), DriverRecorder())
    assert gc_now(root, keep=1).expired == (1,)
    build(tmp_path, 16)
    roll_back(open_store(root), 2, "run")
    for version in (3, 5):
        again = train_model(tree(f"{root}@{version}"), DriverRecorder())
        assert again.skipped and (again.result, again.models_uri) == (trained.result, trained.models_uri)
    with pytest.raises(UsageError, match=r"no finished training .*@4"):
        finished_training(tree(f"{root}@4"))


class Stopped(Exception):
    """Ends a training before its ranks start."""


class CollectsBeforeTheRanksStart:
    """An observer that runs `gc` when the training is planned, then stops it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.expired: tuple[int, ...] = ()

    def step(self, step: object) -> None:
        raise AssertionError("a rank started")

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "plan":
            self.expired = collect(self.root)
            raise Stopped


def collect(root: str) -> tuple[int, ...]:
    return collect_garbage(open_store(root), Retention(keep=1, older_than_seconds=0.0), "gc").expired


def test_a_version_does_not_expire_while_a_training_reads_it(tmp_path: Path):
    root = make_dataset(tmp_path, num_images=60, formats=("parquet",))
    pin = open_dataset(root).pin
    for image_size in (8, 9):
        build_here(str(tmp_path / "images"), root, EtlConfig(image_size=image_size))
    tree = TrainTree(dataset=DatasetConfig(uri=root), models=ModelsConfig(uri=str(tmp_path / "models")),
                     train=TrainConfig(epochs=1, global_batch_size=8, num_streams=2, launcher="inline"))  # fmt: skip
    observer = CollectsBeforeTheRanksStart(root)
    with pytest.raises(Stopped):
        train_model(tree, observer, pin)
    assert observer.expired == (2,)
    assert collect(root) == (1,)


class Dying(DriverRecorder):
    """Ends the training at its sixth step, as a crash would."""

    def step(self, step) -> None:
        super().step(step)
        if len(self.steps) == 6:
            raise Killed


@pytest.mark.parametrize("global_batch_size", [1, 5, 24, 30, 64, 67, 100, 256, 1000])
def test_every_rank_has_a_stream_and_every_stream_equally_many_rows_of_a_batch(global_batch_size: int):
    for world_size in range(1, global_batch_size + 1):
        num_streams = num_streams_for(global_batch_size, world_size)
        assert global_batch_size % num_streams == 0
        assert all(len(streams_of_rank(rank, world_size, num_streams)) for rank in range(world_size))
        if world_size > 8 and global_batch_size % world_size == 0:
            assert num_streams == world_size, "equal shares, if the batch has them"
    up_to_8 = {num_streams_for(global_batch_size, world_size) for world_size in range(1, min(9, global_batch_size + 1))}
    assert len(up_to_8) == 1


@pytest.mark.parametrize(
    ("num_workers", "num_streams"), [(1, 8), (3, 8), (8, 8), (9, 16), (16, 16), (20, 32), (64, 64)]
)
def test_any_number_of_ranks_up_to_the_batch_is_accepted_by_default(num_workers: int, num_streams: int):
    config = TrainConfig(num_workers=num_workers)
    assert config.num_streams == 0 and resolve(config, SparkConfig()).config.num_streams == num_streams
    for given, said in (
        ({"num_workers": 65}, "65 with train.global_batch_size = 64; .* set train.num_workers = 64 or less"),
        ({"num_workers": 9, "num_streams": 8}, "9 for train.num_streams = 8; .* set train.num_workers = 8 or less"),
    ):
        with pytest.raises(UsageError, match=f"train.num_workers = {said}"):
            resolve(TrainConfig(**given), SparkConfig())


@pytest.mark.parametrize(("num_gpus", "expected"), [(3, 2), (8, 8), (12, 8), (16, 16)])
def test_auto_uses_all_devices_that_get_equal_shares(num_gpus: int, expected: int):
    facts = Facts(
        num_workers=0, num_ranks=1, local_steps=1, backend="torch", is_keras_model=False, num_devices=num_gpus,
        spark_master="local[*]", installed=frozenset({"torch_ddp", "local"}), num_started=0, num_named=0, only_one="",
        num_gpus=num_gpus, may_use_cluster=False, num_slots=None, rank_slots_problem="", num_steps=10_000,
        num_rows=10**6,
    )  # fmt: skip
    assert choose_ranks(TrainConfig(), facts)[0] == expected
    # What is set, is kept.
    assert choose_ranks(TrainConfig(num_streams=8), facts)[0] == min(8, expected)


def rejoined(tree: TrainTree) -> TrainTree:
    """As `runs/ID/config.toml` of a run gives it again."""
    return TrainTree.model_validate(tomllib.loads(to_toml(tree)))


@pytest.mark.needs("horovod")
def test_a_resume_keeps_the_streams_with_which_the_training_began(tiny_uri, tmp_path, monkeypatch):
    expected = train_model(tree_of(tiny_uri, tmp_path / "whole", num_streams=12), DriverRecorder()).result
    tree = tree_of(tiny_uri, tmp_path / "models", num_streams=0, checkpoint_every_steps=3)
    # As on a machine that has 9 GPUs: a batch of 24 then has 12 streams.
    monkeypatch.setattr("train.config.num_streams_for", lambda batch, ranks: num_streams_for(batch, max(9, ranks)))
    with pytest.raises(Killed):
        train_model(tree, Dying())
    monkeypatch.undo()

    assert resolve(tree.train, SparkConfig()).config.num_streams == 8
    ranks = {"num_workers": 13, "launcher": "local", "strategy": "horovod"}
    too_many = tree.model_copy(update={"train": tree.train.model_copy(update=ranks)})
    with pytest.raises(UsageError, match="13 ranks for a training that began with train.num_streams = 12"):
        train_model(too_many, DriverRecorder())
    weights = tree.train.model_copy(update={"rank_weights": (1.0,) * 13, "num_workers": 0})
    with pytest.raises(UsageError, match="13 ranks .* or train.num_streams = 24"):
        train_model(tree.model_copy(update={"train": weights}), DriverRecorder())
    resumed = train_model(rejoined(tree), DriverRecorder()).result
    assert resumed.weights_sha256 == expected.weights_sha256 and resumed.resumed_from is not None
    # However many ranks there are where it is exported from.
    monkeypatch.setattr("train.config.num_streams_for", lambda batch, ranks: num_streams_for(batch, max(9, ranks)))
    assert finished_training(tree).result == resumed == finished_training(rejoined(tree)).result
    monkeypatch.undo()

    # From the beginning there are as many as for this number of ranks, and that training counts from then on.
    anew = train_model(tree, DriverRecorder(), fresh_for="run-1").result
    assert anew.weights_sha256 != resumed.weights_sha256 and finished_training(tree).result == anew
    # What is set by hand is another training, and is not taken for this one.
    by_hand = tree.model_copy(update={"train": tree.train.model_copy(update={"num_streams": 12})})
    assert train_model(by_hand, DriverRecorder()).skipped is False
    assert train_model(tree, DriverRecorder()).result == anew


def test_changed_settings_resume_with_the_streams_that_the_training_had(tiny_uri, tmp_path, monkeypatch):
    tree = tree_of(tiny_uri, tmp_path / "models", num_streams=0, checkpoint_every_steps=3)
    monkeypatch.setattr("train.config.num_streams_for", lambda batch, ranks: num_streams_for(batch, max(9, ranks)))
    with pytest.raises(Killed):
        train_model(tree, Dying())
    monkeypatch.undo()
    changed = tree.model_copy(update={"train": tree.train.model_copy(update={"learning_rate": 0.01})})
    observer = DriverRecorder()
    resumed = train_model(changed, observer, again=ResumePolicy(allow_change=("learning_rate",))).result
    assert resumed.resumed_from is not None
    [told] = observer.named("changed")
    assert "num_streams" not in told["changes"]
    # The reported windows are those of these streams.
    [plan] = observer.named("plan")
    assert plan["streams_per_rank"] == 12
