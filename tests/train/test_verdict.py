"""Findings about a training's speed and learning, and whether ranks divide a model: tables of docs/auto.md."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import UsageError
from shardmill.formats.encodings import PNG
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.options import ENCODINGS
from shardmill.registry import Entry
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore
from tests.train.training import DriverRecorder, Recorder, task_of, train_here, tree_of
from train.backends.model_spec import ModelSpec
from train.config import TrainConfig
from train.contracts.values import EpochRecord, Progress, StepReport, TimeSpent, has_not_learned
from train.contracts.world import RankDevices
from train.launching import LAUNCHERS
from train.models.user import inputs_hint
from train.planning import shard
from train.planning.memory_fit import decided
from train.planning.setup import Setup, resolve
from train.planning.shard import (
    MemoryBudget,
    ModelFacts,
    division_rules,
    nothing_holds,
    plan_memory,
    row_of,
    shard_if_too_large,
)
from train.planning.state_bytes import StateBytes, StateTask
from train.planning.state_program import count
from train.reporting.observer import GlobalStep
from train.reporting.rank_times import MIN_STEPS, RankRow, RankTimes, StragglerWatch, straggler_among
from train.reporting.run_log import RunLog
from train.reporting.verdict import FirstSteps, StepTimes, Verdict, weighed
from train.settings import MemoryConfig, MeshConfig
from train.strategies import STRATEGIES, less_work_in
from train.strategies.replicated import replicated
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective
from train.training import train_model

TORCH_MODELS = "tests.train.torch_models"


def judged(
    *seconds_of_ranks: dict[str, float], num_steps: int = MIN_STEPS + 1, devices: tuple[str, ...] = ()
) -> Verdict | None:
    """The verdict on steps in which each rank took these seconds; rank 0 with these GPUs."""
    times = StepTimes()
    times.event("rank_started", {"rank": 1, "host": "b", "pid": 7})
    for number in range(num_steps):
        reports = tuple(StepReport(rank, 0, number, num_steps, (0.5).hex(), seconds=seconds) for rank,
                        seconds in enumerate(seconds_of_ranks))  # fmt: skip
        times.step(GlobalStep(0, number, num_steps, (0.5).hex(), (), reports))
    return times.verdict(TrainConfig(), [RankDevices(0, "a", devices)])


def launched(task) -> Verdict:
    times, weighed = StepTimes(), []
    first_steps = FirstSteps(lambda name, fields: weighed.append((name, fields)))
    LAUNCHERS[task.config.launcher].launch(task, SparkConfig(), RunLog(SilentObserver(), [times, first_steps]))
    verdict = times.verdict(task.config)
    assert verdict is not None
    assert len(weighed) == (1 if task.config.num_workers > 1 else 0)
    return verdict


def test_the_larger_of_two_waits_counts_and_small_ones_do_not():
    busy = {"compute": 0.08, "input_wait": 0.01, "allreduce": 0.01}
    assert judged(busy, busy).bound == "compute"
    assert judged(busy, num_steps=700).sentence.endswith(": GPUs or more machines would help")
    assert "train.mixed_precision" in judged(busy, num_steps=700, devices=("0",)).sentence
    # A training of seconds needs no larger machine.
    assert judged(busy).sentence.endswith("is the model's own computation")
    assert judged(busy | {"input_wait": 0.1}, busy | {"input_wait": 0.1}).bound == "input"
    exchanging = judged(busy | {"allreduce": 0.1}, busy | {"allreduce": 0.1})
    assert exchanging.bound == "communication" and exchanging.sentence.endswith("or use fewer ranks (now 2)")
    assert judged(busy | {"allreduce": 0.1, "input_wait": 0.11}).bound == "input"


def test_the_wait_for_a_late_rank_is_not_communication():
    verdict = judged({"compute": 0.05, "allreduce": 0.05}, {"compute": 0.1}, {"compute": 0.05, "allreduce": 0.05})
    assert verdict.bound == "straggler"
    assert verdict.sentence.startswith("straggler: rank 1 on host b takes 2.0x as long as the others")
    assert "100.0 ms against 50.0 ms), mostly computing" in verdict.sentence


def test_what_the_readers_threads_did_distinguishes_storage_from_decoding():
    waits = {"input_wait": 0.1, "compute": 0.1}
    storage, decode = judged(waits | {"fetch": 0.3, "decode": 0.1}), judged(waits | {"fetch": 0.1, "decode": 0.36})
    assert storage.sentence.startswith("input-bound: storage; 50% of a step") and "75% of the" in storage.sentence
    assert decode.sentence.startswith("input-bound: decode; 50% of a step") and "90% of the" in decode.sentence
    short = judged(waits | {"fetch": 0.01, "decode": 0.04}).sentence
    assert short.startswith("input-bound: 50% of a step") and "which dominates short epochs" in short
    assert "train.reading.threads (now 2)" in decode.sentence and 'etl.encoding = "raw"' in decode.sentence


def test_few_steps_say_nothing():
    assert judged({"compute": 1.0}, num_steps=MIN_STEPS) is None
    assert StepTimes().verdict(TrainConfig()) is None


def test_the_times_of_each_rank_are_summed_since_the_last_restart():
    times = StepTimes()
    seconds = {"input_wait": 0.25, "compute": 0.5, "allreduce": 0.125, "checkpoint": 2.0, "total": 2.875, "fetch": 9.0}

    def steps(number: int, num_ranks: int) -> None:
        for step in range(number):
            spent = [{**seconds, "compute": 0.5 + rank} for rank in range(num_ranks)]
            reports = tuple(StepReport(rank, 0, step, 9, (0.5).hex(), seconds=each) for rank, each in enumerate(spent))
            times.step(GlobalStep(0, step, 9, (0.5).hex(), (), reports))

    placement = [RankDevices(0, "a", ()), RankDevices(1, "b", ("0",))]
    assert times.rows(placement) == ()
    steps(5, num_ranks=3)
    times.event("restarted", {"rank": 0})
    steps(3, num_ranks=2)
    parts = {"input_wait": 0.5, "compute": 1.0, "allreduce": 0.25, "checkpoint": 4.0}
    assert times.rows(placement) == (RankRow(0, "a", 2, parts), RankRow(1, "b", 2, {**parts, "compute": 3.0}))


def test_a_straggler_is_named_while_it_holds_the_others_up_once():
    now, warned = [0.0], []
    watch = StragglerWatch(lambda name, fields: warned.append((name, dict(fields))), less_work_in(TrainConfig()), 30.0,
                           clock=lambda: now[0])  # fmt: skip
    watch.event("rank_started", {"rank": 1, "host": "b", "pid": 7})
    usual, late = {"compute": 0.5, "allreduce": 0.5}, {"compute": 1.0}

    def steps(number: int, *seconds_of_ranks: dict[str, float]) -> None:
        for step in range(number):
            now[0] += 1.0
            reports = tuple(
                StepReport(rank, 0, step, 1000, (0.5).hex(), seconds=each) for rank, each in enumerate(seconds_of_ranks)
            )
            watch.step(GlobalStep(0, step, 1000, (0.5).hex(), (), reports))

    # The first step compiles, and a short pause is nobody's fault.
    steps(1, {"compute": 0.5}, {"compute": 60.0})
    steps(29, usual, usual)
    steps(2, usual, late)
    assert not warned
    steps(100, usual, late)
    [(name, fields)] = warned
    assert name == "train.straggler" and fields["rank"] == 1
    assert fields["warning"].startswith("straggler: rank 1 on host b takes 2.0x as long as the others")
    assert "train.rank_weights" in fields["warning"]
    # It recovers, and is named again when it falls back.
    steps(100, usual, usual)
    steps(100, usual, late)
    assert len(warned) == 2


@pytest.mark.parametrize(
    ("asked", "less_work"),
    [
        ({"strategy": "torch_ddp", "num_workers": 2}, "give it less work with train.rank_weights, or remove it"),
        # A stage reads no fewer rows, also if `auto` has made it one.
        ({"mesh": {"pipeline": 2}}, "or give its stage fewer layers (by the model's `stages()`, or with more ranks)"),
    ],
)
def test_the_advice_for_a_slow_rank_is_that_of_the_planned_strategy(asked, less_work):
    config = resolve(TrainConfig(**asked, model="vit_tiny", launcher="local"), SparkConfig()).config
    seconds_of_ranks = {0: RankTimes(20, compute=1.0), 1: RankTimes(20, compute=2.0)}
    slow = straggler_among(seconds_of_ranks, {1: "b"}, less_work_in(config))
    assert str(slow) == (
        "straggler: rank 1 on host b takes 2.0x as long as the others for its own part of a step (100.0 ms against "
        f"50.0 ms), mostly computing, and they wait for it: check which other processes run there, {less_work}"
    )


EXCHANGE_CASES = [
    # Milliseconds of a step and of its exchange, choice, and what must be among the words.
    (100, 19, "exchange_small", "19.0 ms of a step of 100.0 ms (19%), measured here: a change would gain nothing"),
    (100, 21, "exchange_large", "(21%), measured here: unchanged: a step exchanges once"),
    (3, 2.5, "exchange_large", "fewer ranks (now 4)"),
    # A step in which no time was measured.
    (0, 0, "exchange_small", "0.0 ms of a step of 0.0 ms"),
]


@pytest.mark.parametrize(("step_ms", "exchange_ms", "choice", "words"), EXCHANGE_CASES)
def test_exchange(step_ms: float, exchange_ms: float, choice: str, words: str):
    found, _, reason = weighed(step_ms / 1000, exchange_ms / 1000, 4, "measured here")
    assert found == choice and words in reason


def test_the_exchange_is_weighed_once_by_the_first_steps_of_several_ranks():
    told = []
    first = FirstSteps(lambda name, fields: told.append((name, dict(fields))))

    def steps(number: int, *seconds_of_ranks: dict[str, float]) -> None:
        for step in range(number):
            reports = tuple(
                StepReport(rank, 0, step, 1000, (0.5).hex(), seconds=each) for rank, each in enumerate(seconds_of_ranks)
            )
            first.step(GlobalStep(0, step, 1000, (0.5).hex(), (), reports))

    # The first step compiles; and to wait for another rank is no exchange.
    early, late = {"compute": 0.04, "allreduce": 0.06}, {"compute": 0.09, "allreduce": 0.01}
    first.event("compression", {"rank": 0, "compression": "bf16", "sent_bytes": 1024, "gradient_bytes": 2048})
    steps(1, {"compute": 9.0, "allreduce": 9.0}, {"compute": 9.0, "allreduce": 9.0})
    steps(MIN_STEPS - 1, early, late)
    assert not told and not first.reason
    steps(100, early, late)
    [(name, fields)] = told
    assert (name, fields["choice"], fields["reason"]) == ("train.exchange", "exchange_small", first.reason)
    assert first.reason.startswith(
        "exchange: 10.0 ms of a step of 100.0 ms (10%), measured in 10 of its first steps, with 1.0 KiB for 2.0 KiB of "
        "gradients (bf16): "
    )
    # One rank that is left exchanges nothing.
    first.event("restarted", {"rank": 0})
    steps(100, {"compute": 0.1})
    assert len(told) == 1


def test_the_exchange_of_a_sharded_model_is_reported_with_its_collectives():
    first = FirstSteps(lambda name, fields: None)
    first.event("collectives", {"rank": 0, "num_calls": 7, "all_gather_bytes": 2048, "all_reduce_bytes": 1024})
    for step in range(MIN_STEPS + 1):
        reports = tuple(
            StepReport(rank, 0, step, 1000, (0.5).hex(), seconds={"compute": 0.1, "allreduce": 0.05}) for rank in (0, 1)
        )
        first.step(GlobalStep(0, step, 1000, (0.5).hex(), (), reports))
    assert "of its first steps, in 7 collectives over 3.0 KiB: " in first.reason


class SlowStore:
    """`slow:///folder` is a local folder each of whose reads takes its time."""

    def __init__(self, uri: str) -> None:
        self._store = LocalStore(uri.removeprefix("slow://"))
        self.uri = uri
        self.local_root, self.deadline_seconds = None, 0.0

    def __getattr__(self, name: str):
        return functools.partial(self._late, name)

    def _late(self, name: str, *arguments, **named):
        if name in ("read_range", "read_blocks"):
            time.sleep(0.2)
        return getattr(self._store, name)(*arguments, **named)


def test_slow_storage_is_found(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setitem(STORES.entries, "slow", Entry("tests.train.test_verdict:SlowStore", "late"))
    # In windows of one chunk: a split that fits into them would be read in the first epoch alone.
    config = {"epochs": 5, "num_streams": 1, "reading": {"window_budget_bytes": 1}}
    verdict = launched(task_of(f"slow://{tiny_uri}", tmp_path, model=f"{TORCH_MODELS}:linear", **config))
    assert verdict.bound == "input" and verdict.sentence.startswith("input-bound: storage; ")


def _decode_late(data, shape_HWC, out_HWC):
    time.sleep(0.01)
    return PNG.decode(data, shape_HWC, out_HWC)


LATE_PNG = replace(PNG, decode=_decode_late)


def test_slow_decoding_is_found(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setitem(ENCODINGS.entries, "png", Entry("tests.train.test_verdict:LATE_PNG", "takes its time"))
    verdict = launched(task_of(tiny_uri, tmp_path, model=f"{TORCH_MODELS}:linear", epochs=5, reading={"threads": 1}))
    assert verdict.bound == "input" and verdict.sentence.startswith("input-bound: decode; ")


class SlowExchange(TorchCollective):
    """As over a network that is slow; a step of a linear model takes a few milliseconds."""

    def sum_tensors(self, tensors):
        sums = super().sum_tensors(tensors)
        time.sleep(0.3)
        return sums


SLOW_EXCHANGE = replace(TORCH_DDP, join=replicated(lambda world, config: SlowExchange(world)))


@pytest.mark.drill
def test_a_slow_rank_and_a_slow_exchange_are_found(tiny_uri, tmp_path):
    several = {"num_workers": 2, "launcher": "local", "strategy": "torch_ddp", "epochs": 2, "global_batch_size": 16}
    late = launched(task_of(tiny_uri, tmp_path / "late", model=f"{TORCH_MODELS}:LateOnRank1", **several))
    assert late.bound == "straggler" and late.sentence.startswith("straggler: rank 1 on host ")
    slow = {**several, "strategy": "tests.train.test_verdict:SLOW_EXCHANGE"}
    tiny = launched(task_of(tiny_uri, tmp_path / "tiny", model=f"{TORCH_MODELS}:linear", **slow))
    assert tiny.bound == "communication", tiny.sentence
    assert tiny.sentence.startswith("communication-bound: ")
    assert "raise train.global_batch_size (now 16) for fewer exchanges, or use fewer ranks (now 2)" in tiny.sentence


GIB = 2**30
# 1 GiB of weights, with Adam: 4 GiB; 2 GiB of activations for each of 8 images.
STATE = StateBytes(GIB, GIB, 2 * GIB, image=2 * GIB)
HALF = StateBytes(GIB // 2, GIB // 2, GIB, gathered=3 * GIB, image=2 * GIB)
DIVIDED = replace(HALF, gathered=0, image=GIB)
SMALLER = replace(DIVIDED, parameters=GIB // 4, optimizer=GIB // 2)
CONFIG = TrainConfig(
    model="vit",
    num_workers=2,
    strategy="torch_ddp",
    global_batch_size=16,
    num_streams=8,
    backend="torch",
    launcher="local",
)


def set_up(**settings: object) -> Setup:
    return resolve(CONFIG.model_copy(update=settings), SparkConfig())


def facts(device_gib: float, **states: StateBytes) -> ModelFacts:
    budget = MemoryBudget("one T4", int(device_gib * GIB), GIB, 0, is_host=False)
    rows = {name: row_of(set_up(strategy=name), state, budget) for name, state in states.items()}
    return ModelFacts("one T4", budget.device_bytes, rows)


def all_of(device_gib: float, **other: StateBytes) -> ModelFacts:
    states = {"torch_ddp": STATE, "torch_fsdp": HALF, "tensor_parallel": DIVIDED, "hybrid": SMALLER, **other}
    return facts(device_gib, **states)


CASES = [
    # Facts, row, and what must be among the words.
    (all_of(80), "whole", ""),
    (all_of(7), "whole", ""),
    (all_of(6.9, torch_fsdp=replace(HALF, gathered=GIB)), "torch_fsdp",
     "one device does not hold the model: parameters 1.0 GiB + gradients 1.0 GiB + optimizer 2.0 GiB + activations "
     "2.0 GiB + framework 1.0 GiB = 7.0 GiB, and one T4 has 6.9 GiB; shared (fsdp 2) it needs parameters 512.0 MiB"),
    (all_of(5), "tensor_parallel",
     "one device does not hold a layer: with whole layers, shared by all ranks, parameters 512.0 MiB + gradients "
     "512.0 MiB + optimizer 1.0 GiB + activations 2.0 GiB + exchange 3.0 GiB + framework 1.0 GiB = 8.0 GiB, and one"),
    (all_of(3.5), "hybrid", "with divided layers (tensor 2) it needs parameters 256.0 MiB"),
    (all_of(5, tensor_parallel=StateBytes(refused="3 heads")), "hybrid", "one device does not hold a layer"),
    (facts(5, torch_ddp=STATE, tensor_parallel=DIVIDED), "tensor_parallel",
     "and one T4 has 5.0 GiB; shared (tensor 2) it needs parameters 512.0 MiB"),
    (all_of(3), "refused", ""),
    (facts(3, torch_ddp=STATE), "refused", ""),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "choice", "words"), CASES)
def test_division(facts: ModelFacts, choice: str, words: str):
    rule = next(rule for rule in division_rules() if rule.applies(facts))
    assert rule.choice == choice and words in rule.because(facts)


def test_a_row_says_how_it_fits():
    row = all_of(7).rows["torch_ddp"]
    assert (row.total, row.activations, row.accumulation_steps) == (7 * GIB, 2 * GIB, 8)
    assert row.verdict == "yes with train.accumulation_steps = 8"
    assert all_of(80).rows["torch_ddp"].verdict == "yes" and all_of(80).rows["torch_ddp"].total == 21 * GIB
    assert all_of(5).rows["torch_ddp"].verdict == "no"
    budget = MemoryBudget("one T4", int(6.2 * GIB), GIB, 0, is_host=False)
    assert row_of(set_up(mixed_precision="auto"), STATE, budget).verdict.endswith("train.mixed_precision = 'bfloat16'")
    # A host also has the copy of which a checkpoint is written.
    assert row_of(set_up(), STATE, replace(budget, is_host=True)).checkpoint == 3 * GIB
    # And so rank 0's host must hold the whole model before the ranks have their parts.
    large = replace(DIVIDED, start=9 * GIB)
    host = MemoryBudget("a host", 8 * GIB, GIB, 0, is_host=True)
    assert row_of(set_up(), large, replace(host, is_host=False)).fits
    assert row_of(set_up(), large, host).verdict == "no: it begins with all parameters, 10.0 GiB"
    # What is exchanged behind the backward pass takes the place of the activations.
    assert row_of(set_up(), replace(STATE, update=3 * GIB), budget).exchange == GIB


def test_a_model_that_no_ranks_hold_is_refused_with_what_is_needed():
    error = str(nothing_holds(set_up(), all_of(3)))
    assert (
        "on 2 ranks needs parameters 1.0 GiB" in error
        and "hybrid (tensor 2) needs 3.2 GiB, the least of the strategies that auto" in error
    )
    assert "set train.num_workers higher" in error
    assert "set train.strategy" not in error
    stages = replace(SMALLER, image=GIB // 4)
    chosen = str(nothing_holds(set_up(), all_of(3, pipeline_parallel=stages)))
    assert "auto chooses; expected" in chosen
    assert "set train.strategy = 'pipeline_parallel' with train.accumulation_steps = 8, which fits; or set" in chosen
    alone = str(nothing_holds(set_up(), facts(3, torch_ddp=STATE)))
    assert "num_workers" not in alone and "use a smaller model or larger devices" in alone


@pytest.mark.usefixtures("asked_here")
def test_auto_divides_a_model_that_one_device_does_not_hold(tiny_uri, tmp_path, monkeypatch):
    """For a limit between what a rank needs of the whole model and of a half."""
    counted: dict[tuple[str, ...], tuple[StateBytes, ...]] = {}

    def count_once(configs: tuple[TrainConfig, ...], spec: ModelSpec) -> tuple[StateBytes, ...]:
        key = tuple(config.strategy for config in configs)
        if key not in counted:
            task = StateTask(tuple(decided(each, 1, to_bfloat16=False) for each in configs), spec)
            counted[key] = count(task).of_configs
        return counted[key]

    # The budget is nothing that it counts.
    monkeypatch.setattr(shard, "count_state", count_once)
    spark, dataset = SparkConfig(), open_dataset(tiny_uri)
    open_to_choose = {"model": "tests.train.torch_models:shallow_vit", "num_workers": 2, "devices": "cpu",
                      "accumulation_steps": 12}  # fmt: skip
    tree = tree_of(tiny_uri, tmp_path, **open_to_choose)
    rows = {row.strategy: row for row in plan_memory(tree, GIB).strategies}

    def planned(budget_bytes: int, **other: object) -> Setup:
        memory = MemoryConfig(budget_bytes=budget_bytes)
        return shard_if_too_large(resolve(tree.train.model_copy(update={"memory": memory, **other}), spark, dataset))

    between = (rows["torch_ddp"].total + rows["torch_fsdp"].total) // 2
    assert planned(rows["torch_ddp"].total).config.strategy == "torch_ddp"
    divided = planned(between)
    assert divided.config.strategy == "torch_fsdp" and rows["torch_fsdp"].arithmetic in divided.reason
    assert divided.in_short == "2 ranks (strategy torch_fsdp, launcher local): one device does not hold the model"
    assert planned(between, strategy="torch_ddp").config.strategy == "torch_ddp", "what is set stays"
    assert plan_memory(tree, between).choice == "torch_fsdp"
    with pytest.raises(
        UsageError, match=r"shallow_vit' on 2 ranks needs parameters .*, the least of the strategies that auto chooses;"
    ):
        planned(2**20)
    nothing = plan_memory(tree, 2**20)
    assert nothing.choice == "" and "the least of the strategies that auto chooses" in nothing.reason


@pytest.mark.starts("ranks")
def test_a_keras_model_whose_state_no_rank_holds_is_refused(tiny_uri, tmp_path):
    """Its layers cannot be divided; that is known when a step was measured."""
    tree = tree_of(tiny_uri, tmp_path, model="tests.train.models_under_test:linear", num_workers=2, num_streams=8)
    tree = tree.model_copy(update={"train": tree.train.model_copy(update={"memory": MemoryConfig(budget_bytes=1000)})})
    wanted = (
        r"optimizer take .* KiB, and train.memory.budget_bytes has 1.0 KiB; expected a PyTorch module, of which each"
    )
    with pytest.raises(UsageError, match=wanted):
        train_model(tree, DriverRecorder())


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "sizes", "words"),
    [
        ("hybrid", 2, {}, "the mesh tensor 2, so that no weights are sharded: set train.mesh.fsdp = 2"),
        ("hybrid", 3, {}, "on 3 ranks has the mesh fsdp 3, so that no layer is divided: set train.mesh.tensor = 2"),
        ("hybrid", 9, {"fsdp": 3}, ""),
        ("hybrid", 9, {"fsdp": 9}, "the mesh fsdp 9, so that no layer is divided"),
        ("hybrid", 9, {"fsdp": 3, "tensor": 1}, ""),
        ("hybrid", 4, {}, ""),
        ("tensor_parallel", 3, {}, ""),
        ("tensor_parallel", 2, {"data": 2}, "the mesh data 2, so that no layer is divided"),
        ("torch_ddp", 3, {}, ""),
    ],
)
def test_an_axis_that_ranks_leave_empty_is_warned_about(strategy, num_ranks, sizes, words):
    config = TrainConfig(strategy=strategy, num_workers=num_ranks, mesh=MeshConfig(**sizes), model="vit")
    told = resolve(config, SparkConfig()).unused_axes_warning
    assert words in told and bool(words) == bool(told)


@pytest.mark.parametrize(("extra", "said"), [(0, ""), (1, "is larger than the train split (93 images)")])
def test_a_batch_that_the_train_split_does_not_fill_is_warned_about(tiny_uri, extra, said):
    dataset = open_dataset(tiny_uri)
    batch = dataset.manifest.splits["train"].num_rows + extra
    setup = resolve(TrainConfig(global_batch_size=batch), SparkConfig(), dataset)
    setup.warn(recorder := DriverRecorder())
    assert [each["warning"] for each in recorder.named("large_batch")] == list(setup.warnings)
    assert bool(said) == bool(setup.warnings) and said in "".join(setup.warnings)
    assert f"train.global_batch_size = {batch}" in "".join(setup.warnings) or not said


def test_one_rank_that_nobody_has_asked_for_is_warned_about(tiny_uri, tmp_path):
    """Nothing is shared then, whatever the strategy promises."""
    for name, strategy in STRATEGIES.installed().items():
        told = resolve(TrainConfig(strategy=name, model="vit"), SparkConfig()).single_rank_warning
        assert bool(told) == strategy.needs_module, name
    for asked in ({"num_workers": 1}, {"num_workers": 2}, {"mesh": MeshConfig(fsdp=2)}):
        config = TrainConfig(strategy="torch_fsdp", model="vit", launcher="local", **asked)
        assert not resolve(config, SparkConfig()).single_rank_warning
    recorder = DriverRecorder()
    model = "tests.train.torch_models:linear"
    train_model(tree_of(tiny_uri, tmp_path, model=model, strategy="torch_fsdp", epochs=1), recorder)
    assert recorder.named("one_rank")[-1]["warning"] == (
        "train.strategy = 'torch_fsdp' has one rank, which holds the whole model (one process uses all devices of this "
        "machine): set train.num_workers, or sizes of train.mesh, to share it"
    )


def test_a_model_that_learns_nothing_is_reported_once(tiny_uri, tmp_path):
    observer = Recorder()
    # Without dropout and augmentation its loss is the same in every epoch.
    model = "tests.train.torch_models:linear"
    still = {"model": model, "augment": {"random_crop_padding": 0}, "optimizer": "sgd", "learning_rate": 1e-12}
    still |= {"epochs": 6, "global_batch_size": 24, "schedule": "constant"}
    train_here(tiny_uri, tmp_path / "still", observer, **still)
    # Four steps an epoch: the fifth epoch is the first one with enough of them behind it, and the warning comes once.
    [told] = observer.named("loss_stuck")
    assert told["epoch"] == 4 and told["warning"].startswith("the loss has not fallen by the end of epoch 5 (now ")
    assert told["warning"].endswith(f"): change train.learning_rate{inputs_hint(TrainConfig(model=model))}")
    learning = Recorder()
    train_here(tiny_uri, tmp_path / "learning", learning, epochs=6, global_batch_size=24)
    assert learning.named("loss_stuck") == []


def test_too_few_steps_say_nothing_about_a_model():
    def history(*losses: float, num_steps: int) -> tuple[EpochRecord, ...]:
        return tuple(EpochRecord(epoch, num_steps, loss, 0.3, 1e-3, 1.0, None) for epoch, loss in enumerate(losses))

    assert not has_not_learned(history(1.8852, 2.3616, num_steps=2))
    assert has_not_learned(history(1.8852, 2.3616, num_steps=10))
    assert not has_not_learned(history(1.8852, 2.3616, 2.4, num_steps=10)), "it was said after the second epoch"
    assert not has_not_learned(history(1.8852, 1.5530, num_steps=10))


def test_an_epoch_that_begins_again_has_no_batch_left_out_yet():
    spent = TimeSpent(0.0, 0.0, 0.0)
    skipped = Progress().after_skip(8, spent).after_skip(8, spent).at_epoch_start()
    assert (skipped.skipped.total, skipped.skipped.num_rows) == (2, 0)


def test_the_hint_at_the_inputs_is_about_a_users_model_and_its_setting():
    assert inputs_hint(TrainConfig()) == ""
    assert "wants train.standardize = false" in inputs_hint(TrainConfig(model="mine:build"))
    unscaled = inputs_hint(TrainConfig(model="mine:build", standardize=False))
    assert "from 0 to 255" in unscaled and "wants train.standardize = true" in unscaled
