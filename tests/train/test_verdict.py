"""Findings about a training's speed: from given times, and from trainings that are really slowed down."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import pytest

from shardmill.formats.encodings import PNG
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.options import ENCODINGS
from shardmill.registry import Entry
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore
from tests.train.training import task_of
from train.config import TrainConfig
from train.contracts.values import StepReport
from train.contracts.world import RankDevices
from train.launching import LAUNCHERS
from train.planning.auto import resolve
from train.reporting.observer import GlobalStep
from train.reporting.rank_times import MIN_STEPS, RankRow, RankTimes, StragglerWatch, straggler_among
from train.reporting.run_log import RunLog
from train.reporting.verdict import FirstSteps, StepTimes, Verdict, weighed
from train.strategies import less_work_in
from train.strategies.replicated import replicated
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective

TORCH_MODELS = "tests.train.torch_models"


def judged(
    *seconds_of_ranks: dict[str, float], num_steps: int = MIN_STEPS + 1, devices: tuple[str, ...] = ()
) -> Verdict | None:
    """The verdict on steps in which each rank took these seconds; rank 0 with these GPUs."""
    times = StepTimes()
    times.event("rank_started", {"rank": 1, "host": "b", "pid": 7})
    for number in range(num_steps):
        reports = tuple(
            StepReport(rank, 0, number, num_steps, (0.5).hex(), seconds=seconds)
            for rank, seconds in enumerate(seconds_of_ranks)
        )
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
    assert judged(busy, busy).bound == "compute" and judged(busy).sentence.endswith(
        ": GPUs or more machines would help"
    )
    assert "train.mixed_precision" in judged(busy, devices=("0",)).sentence
    assert judged(busy | {"input_wait": 0.1}, busy | {"input_wait": 0.1}).bound == "input"
    exchanging = judged(busy | {"allreduce": 0.1}, busy | {"allreduce": 0.1})
    assert exchanging.bound == "communication" and exchanging.sentence.endswith("or use fewer ranks (now 2)")
    assert judged(busy | {"allreduce": 0.1, "input_wait": 0.11}).bound == "input"


def test_the_wait_for_a_late_rank_is_not_communication():
    verdict = judged({"compute": 0.05, "allreduce": 0.05}, {"compute": 0.1}, {"compute": 0.05, "allreduce": 0.05})
    assert verdict.bound == "straggler"
    assert verdict.sentence.startswith("straggler: rank 1 on host b takes 2.0x as long as the others")
    assert "100.0 ms against 50.0 ms), mostly computing" in verdict.sentence


def test_what_the_readers_threads_did_tells_storage_from_decoding():
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
            reports = tuple(
                StepReport(rank, 0, step, 9, (0.5).hex(), seconds={**seconds, "compute": 0.5 + rank})
                for rank in range(num_ranks)
            )
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
    watch = StragglerWatch(
        lambda name, fields: warned.append((name, dict(fields))),
        less_work_in(TrainConfig()),
        30.0,
        clock=lambda: now[0],
    )
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


def test_the_exchange_of_a_sharded_model_is_told_with_its_collectives():
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
    late = launched(task_of(tiny_uri, tmp_path / "late", model=f"{TORCH_MODELS}:late_on_rank_1", **several))
    assert late.bound == "straggler" and late.sentence.startswith("straggler: rank 1 on host ")
    slow = {**several, "strategy": "tests.train.test_verdict:SLOW_EXCHANGE"}
    tiny = launched(task_of(tiny_uri, tmp_path / "tiny", model=f"{TORCH_MODELS}:linear", **slow))
    assert tiny.bound == "communication", tiny.sentence
    assert tiny.sentence.startswith("communication-bound: ")
    assert "raise train.global_batch_size (now 16) for fewer exchanges, or use fewer ranks (now 2)" in tiny.sentence
