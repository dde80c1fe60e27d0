"""What the driver and its ranks say to each other, and what other processes of a training say."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TextIO, get_args

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.errors import ERROR_BY_EXIT_CODE, ShardmillError, TrainingError, UsageError
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from shardmill.jobs.observer import WARNING, FieldValue, SilentObserver
from shardmill.stores import open_store
from tests.processes import is_running
from tests.programs.answer_in_every_way import Task
from tests.train.forked_ranks import launch_forked
from tests.train.inline_workers import HERE, inline_task, launch_watched
from tests.train.ranks import Watcher
from tests.train.training import DriverRecorder, check_terms, task_of, tree_of
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.values import OUTPUT, from_json, to_json
from train.launching import messages
from train.launching.messages import Event, Exchange, Exchanged, Failure, Heartbeat, Stop, Timed
from train.launching.processes import MAX_LINE_BYTES, MAX_TOLD_BYTES, NUM_TAIL_LINES, RankOutput, gathered
from train.launching.side_process import Question, ask
from train.launching.spark_slots import num_rank_slots, num_slots_of
from train.models import MODELS
from train.planning.setup import resolve
from train.planning.trial_build import may_not_build, try_build
from train.reporting.observer import GlobalStep
from train.reporting.run_log import RanksLog, RunLog
from train.training import train_model


@pytest.mark.parametrize(
    ("message", "same"),
    [
        (Timed("a step"), Timed("a step", 0, 0.0)),
        (Heartbeat(), Heartbeat(0, Activity("its own work"), ())),
        (Event("resumed"), Event("resumed", {})),
        (Exchange("00"), Exchange("00", "main")),
        (Exchanged(("00",)), Exchanged(("00",), "main")),
        (Stop(), Stop("")),
    ],
)
def test_what_a_message_does_not_say_is_nothing(message, same):
    assert message == same and from_json(type(message), to_json(message)) == message


def test_every_message_has_a_kind_of_its_own():
    kinds = [
        next(field.default for field in fields(each) if field.name == "kind") for each in get_args(messages.Message)
    ]
    assert len(set(kinds)) == len(kinds) == 21


def failure(error_type: str, exit_code: int, place: str = "") -> Failure:
    return Failure(error_type, "what", "expected", "fix", exit_code, False, "", place)


@pytest.mark.parametrize(("exit_code", "kind"), ERROR_BY_EXIT_CODE.items())
def test_an_error_of_ours_is_raised_once_more(exit_code: int, kind: type[ShardmillError]):
    received = failure(kind.__name__, exit_code)
    assert received.is_ours
    raised = received.as_raised(" (rank 1)")
    assert type(raised) is kind and (raised.what, raised.expected, raised.fix) == ("what (rank 1)", "expected", "fix")
    assert received.as_raised().what == "what"


def test_an_error_of_other_code_is_reported_with_its_line():
    assert not failure("ValueError", 5).is_ours
    assert str(failure("ValueError", 5)) == "ValueError: what"
    assert str(failure("ValueError", 5, "model.py:3")) == "ValueError: what (model.py:3)"


PROGRAM = "tests.programs.answer_in_every_way"


def asked(way: str, timeout_seconds: float | None = None) -> int:
    question = Question(PROGRAM, to_json(Task(way)), {}, timeout_seconds, "train.patience")
    return ask(question, int, lambda how: TrainingError(f"the work {how}"))


@pytest.mark.starts("ranks")
def test_what_it_has_started_is_gone_when_it_has_answered():
    # Who was sent SIGKILL may take a moment.
    pid, deadline_seconds = asked("answers"), time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline_seconds, f"process {pid}, which the work started, still runs"
        time.sleep(0.02)


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("way", "kind", "said", "noted"),
    [
        ("refuses", UsageError, "too few; expected more; add some", "raise UsageError("),
        ("raises", TrainingError, r"the work failed: KeyError: 'absent' (.*answer_in_every_way.py:\d+)", "in work"),
        ("leaves", TrainingError, "the work exited with code 3: goodbye", "nothing to do here"),
        ("crashes", TrainingError, r"the work was killed by SIGSEGV (.*answer_in_every_way.py:\d+)", "Segmentation"),
    ],
)
def test_how_it_ends_is_reported(way: str, kind: type[ShardmillError], said: str, noted: str):
    with pytest.raises(kind, match=said.replace("(", r"\(").replace(")", r"\)")) as caught:
        asked(way)
    assert noted in "".join(caught.value.__notes__)


@pytest.mark.starts("ranks")
def test_one_that_hangs_is_ended():
    with pytest.raises(TrainingError, match="the work did not finish within train.patience = 1"):
        asked("hangs", timeout_seconds=1)


def read(data: bytes) -> tuple[str, str]:
    """-> what is told of a process that prints this, the end that is kept."""
    told: list[str] = []
    output = RankOutput(io.BufferedReader(io.BytesIO(data)), told.append)  # pyright: ignore[reportArgumentType]
    output.read()
    assert all(text.endswith("\n") for text in told)
    return "".join(told), output.tail()


def test_lines_are_reported_whole_and_the_last_ones_kept():
    assert read(b"") == ("", "")
    assert read(b"one\ntwo\nno end") == ("one\ntwo\nno end\n", "one\ntwo\nno end")
    told, tail = read(b"".join(b"line %d \xff\n" % number for number in range(100_000)))
    assert told.count("\n") == 100_000 and "line 99999 \ufffd" in told
    assert tail.splitlines() == [f"line {number} \ufffd" for number in range(100_000)][-NUM_TAIL_LINES:]


def test_what_never_ends_takes_little():
    told, tail = read(b"x" * (10 << 20) + b"y")
    assert told == f"{tail}\n" and len(tail) == MAX_LINE_BYTES and tail.endswith("xy")
    told, tail = read(b"a line\n" * (MAX_TOLD_BYTES // 7 + 1000) + b"the last\n")
    assert MAX_TOLD_BYTES - 10 < len(told) < MAX_TOLD_BYTES + 100 and told.endswith("bytes; truncated)\n")
    assert tail.endswith("a line\nthe last")


class Told:
    """An observer that prints as a driver does, and keeps what it is told that ranks print."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def step(self, step: GlobalStep) -> None:
        print("progress of the driver")

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        print(f"the driver's event {name}")
        if name == OUTPUT:
            self.texts.append(str(fields["text"]))


def test_what_is_printed_here_goes_to_stderr_and_is_reported(capsys):
    told, before = Told(), (sys.stdout, sys.stderr)
    kept: list[TextIO] = []
    with pytest.raises(ValueError, match="the model's"), gathered(told) as observer:
        kept += [sys.stdout, sys.stderr]
        print("one", 1)
        assert not told.texts, "nobody who prints calls the observer"
        thread = threading.Thread(target=lambda: sys.stderr.writelines(["of a thread\n", "no end"]))
        thread.start()
        thread.join()
        observer.event("resumed", {"rank": 0})
        assert "".join(told.texts) == "one 1\nof a thread\n"
        assert (sys.stdout.isatty(), sys.stdout.encoding) == (before[1].isatty(), before[1].encoding)
        raise ValueError("the model's")
    assert "".join(told.texts) == "one 1\nof a thread\nno end\n"
    assert (sys.stdout, sys.stderr) == before
    # A handler of the user's that has kept a stream writes on.
    kept[0].write("later\n")
    out, err = capsys.readouterr()
    assert set(out.splitlines()) == {"the driver's event output", "the driver's event resumed"}
    assert err.splitlines()[0] == "one 1" and err.endswith("later\n")
    assert "of a thread\nno end" in err and "the driver" not in err and "later" not in "".join(told.texts)


def test_what_never_ends_takes_little_here_too(capsys):
    told = Told()
    with gathered(told) as observer:
        for _ in range(MAX_TOLD_BYTES // 7 + 1000):
            print("a line")
        observer.event("resumed", {"rank": 0})
        print("the last")
    text = "".join(told.texts)
    assert MAX_TOLD_BYTES - 10 < len(text) < MAX_TOLD_BYTES + 100 and text.endswith("bytes; truncated)\n")
    assert "the last\n" in capsys.readouterr().err


def test_a_run_in_the_commands_own_process_has_its_log(tiny_uri, tmp_path):
    settings = {"model": "tests.train.models_under_test:chatty", "epochs": 1, "launcher": "inline"}
    given = [f"--set=train.{name}={value}" for name, value in settings.items()]
    places = [f"--set=models.uri={tmp_path}/models", f"--workdir={tmp_path}/work", "--run-id=r"]
    done = CliRunner().invoke(app, ["train", tiny_uri, "--json", *given, *places])
    assert done.exit_code == 0 and "the first layer is built" in done.stderr, done.output
    assert json.loads(done.stdout)["stage"] == "train", "a program reads stdout"
    assert (tmp_path / "work/runs/r/ranks.log").read_text() == "rank 0: the first layer is built\n"


def test_lines_have_their_rank_and_no_secret_and_attempts_add_up(tmp_path: Path):
    names: list[str] = []

    class Names(SilentObserver):
        def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
            names.append(name)

    for attempt in range(2):
        log = RunLog(Names(), [RanksLog(open_store(tmp_path), "run/ranks.log")])
        log.event(OUTPUT, {"rank": 1, "text": f"attempt {attempt}\nof two\n"})
        log.event(OUTPUT, {"rank": 0, "text": "s3://user:password@host/x\n"})
        log.event("other", {})
        log.close()
    lines = (tmp_path / "run" / "ranks.log").read_text().splitlines()
    assert lines[:2] == ["rank 1: attempt 0", "rank 1: of two"] and lines[3:5] == [
        "rank 1: attempt 1",
        "rank 1: of two",
    ]
    assert lines[2] == lines[5] and lines[2].startswith("rank 0: s3://") and "password" not in lines[2]
    assert set(names) == {"train.other"}, "no log of events holds what ranks print"
    assert os.listdir(tmp_path) == ["run"]


# Of a program that ends by its watch; a process that imports, on a busy machine.
_HANG_SECONDS = 120


def test_a_hanging_rank_is_reported_and_ended():
    recorder, handler = DriverRecorder(), signal.getsignal(signal.SIGUSR2)
    with pytest.raises(TrainingError, match="rank 0 .* hangs after step 0 of epoch 0: no progress for 6[02] s"):
        launch_watched(inline_task(), recorder, f"{HERE}:stands_still")
    assert "has made no progress for 3" in recorder.named("rank_paused")[-1][WARNING]
    assert signal.getsignal(signal.SIGUSR2) is handler


def test_a_step_that_sleeps_is_ended_by_what_steps_took():
    with pytest.raises(TrainingError, match="rank 0 .* hangs .*silent_seconds = 30, the longest .* in a step"):
        launch_watched(inline_task(progress_timeout_seconds=9000), DriverRecorder(), f"{HERE}:sleeps_in_a_step")


@pytest.mark.starts("program")
def test_one_that_no_signal_reaches_takes_the_process_with_it():
    command = [sys.executable, "-m", "tests.programs.rank_that_no_signal_reaches"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_HANG_SECONDS, check=False)
    assert ended.returncode == 5
    assert "in holds_on" in ended.stderr and ended.stderr.splitlines()[-1].startswith("ERROR 5: rank 0 ")


@pytest.mark.drill
def test_a_read_without_an_answer_takes_the_process_with_it(tiny_uri, tmp_path):
    """The reader's threads are not waited for: they would hold the end up for as long as the storage is silent."""
    command = [sys.executable, "-m", "tests.programs.rank_that_gets_no_answer", tiny_uri, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_HANG_SECONDS, check=False)
    assert ended.returncode == 5, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("ERROR 5: rank 0 (")
    assert "hangs after step" in ended.stderr.splitlines()[-1]


def test_a_person_at_a_breakpoint_may_take_as_long_as_they_like():
    recorder = DriverRecorder()
    with pytest.raises(TrainingError, match="nobody ended it"):
        launch_watched(inline_task(), recorder, f"{HERE}:is_looked_at")
    assert "rank_paused" not in recorder.names


def test_in_another_thread_nothing_is_watched():
    found: list[BaseException] = []

    def launch() -> None:
        try:
            launch_watched(inline_task(), DriverRecorder(), f"{HERE}:reports_threads")
        except TrainingError as error:
            found.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(_HANG_SECONDS)
    assert "threads: ['MainThread'" in str(found[0]) and "inline-watch" not in str(found[0])


def test_ours_are_tried_where_they_may_not_fit():
    ours = [name for name in MODELS.entries if not may_not_build(resolve(TrainConfig(model=name), SparkConfig()))]
    assert ours == ["small_cnn", "vit", "vit_tiny", "vit_small", "vit_base", "vit_large", "vit_huge"]
    for asked in ({"freeze": ("conv*",)}, {"memory": {"activation_checkpointing": "on"}}, {"sync_batch_norm": True}):
        assert may_not_build(resolve(TrainConfig.model_validate(asked), SparkConfig()))
    recorder, schema = DriverRecorder(), RowSchema("png", (16, 16, 3), ("cat", "dog"))
    assert try_build(resolve(TrainConfig(), SparkConfig()), schema, recorder) is None and not recorder.names


@pytest.mark.drill
def test_a_cluster_is_not_asked_for_ranks_of_a_model_that_does_not_build(tiny_uri, tmp_path):
    how = {"strategy": "torch_ddp", "launcher": "spark_barrier", "num_workers": 2}
    tree = tree_of(tiny_uri, tmp_path / "models", model="tests.train.torch_models:one_class_too_many", **how)
    recorder = DriverRecorder()
    with pytest.raises(UsageError, match=r"shape \(2, 4\) for 2 images; expected 3 outputs") as caught:
        train_model(tree.model_copy(update={"spark": SparkConfig(master="local[2]")}), recorder)
    assert "rank" not in str(caught.value) and recorder.names == ["building"]


@pytest.mark.starts("ranks")
def test_ranks_that_shard_a_model_try_it_themselves_and_none_waits_for_the_other(tiny_uri, tmp_path):
    """The others have it on `meta`, and cannot call it."""
    model = "tests.train.torch_models:one_class_too_many"
    task = task_of(tiny_uri, tmp_path, model=model, strategy="torch_fsdp", num_workers=2, launcher="local")
    with pytest.raises(UsageError, match=r"shape \(2, 4\) for 2 images \(rank 0, .*; expected 3 outputs"):
        launch_forked(task, Watcher())


@pytest.mark.starts("ranks")
def test_what_divides_itself_wrongly_is_refused_before_the_first_step(tiny_uri, tmp_path):
    """In float32, so that what bfloat16 rounds hides nothing."""
    config = {"model": "tests.train.sharded_models:Averaging", "mixed_precision": "bfloat16", "num_workers": 2}
    task = task_of(tiny_uri, tmp_path, strategy="tensor_parallel", launcher="local", **config)
    watcher = Watcher()
    with pytest.raises(UsageError, match=r"2 of 2 ranks compute outputs that differ by up to 0\.\d+ from those of the"):
        launch_forked(task, watcher)
    assert not watcher.losses


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("model", "strategy", "what"), [("Drawing", "tensor_parallel", "losses"), ("Unsummed", "hybrid", "gradients")]
)
def test_ranks_that_share_rows_and_compute_something_else_are_refused(tiny_uri, tmp_path, model, strategy, what):
    """Both compute the right outputs in inference."""
    config = {"model": f"tests.train.sharded_models:{model}", "num_workers": 2, "mesh": {"tensor": 2}}
    task = task_of(tiny_uri, tmp_path, strategy=strategy, launcher="local", **config)
    wanted = (
        rf"in step 1, ranks that divide its layers and have the same rows have different {what}: rank \d [\d.]+, rank"
    )
    with pytest.raises(UsageError, match=wanted):
        launch_forked(task, Watcher())


@pytest.mark.starts("ranks")
def test_what_does_not_compute_when_divided_starts_no_ranks_also_if_a_new_training_is_asked_for(tiny_uri, tmp_path):
    model = "tests.train.sharded_models:Half"
    tree = tree_of(tiny_uri, tmp_path, model=model, strategy="tensor_parallel", num_workers=2, launcher="local")
    recorder = DriverRecorder()
    with pytest.raises(UsageError, match="Half' does not compute with its layers divided: RuntimeError"):
        train_model(tree, recorder, fresh_for="a run")
    assert recorder.names == ["building"]


@pytest.mark.parametrize(
    ("master", "conf", "expected"),
    [
        ("local", {}, 1),
        ("local[4]", {"spark.task.cpus": "2"}, 2),
        ("local[3,2]", {}, 3),
        ("local[*]", {}, os.cpu_count()),
        ("local-cluster[2,3,1024]", {"spark.task.cpus": "2"}, 2),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "4"}, 12),
        ("yarn", {"spark.executor.instances": "3"}, None),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "4",
                  "spark.dynamicAllocation.enabled": "true"}, None),
        ("spark://host:7077", {}, None),
        # A standalone master does not know this setting, and starts as many executors as fit.
        ("spark://host:7077", {"spark.executor.instances": "3", "spark.executor.cores": "4"}, None),
        ("spark://host:7077", {"spark.cores.max": "6", "spark.task.cpus": "4"}, 1),
    ],
)  # fmt: skip
def test_slots_are_counted_where_they_are_known(master, conf, expected):
    assert num_slots_of(master, conf) == expected


@pytest.mark.parametrize(
    ("master", "conf", "num_slots"),
    [
        ("local[4]", {"spark.executor.instances": "3"}, None),
        ("yarn", {}, None),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "8"}, 3),
        ("yarn", {"spark.executor.instances": "3", "spark.dynamicAllocation.enabled": "true"}, None),
        ("spark://a:7077", {"spark.cores.max": "8"}, None),
        ("spark://a:7077", {"spark.cores.max": "8", "spark.executor.cores": "4"}, 2),
        ("local-cluster[2,4,1024]", {}, 2),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "8",
                  "spark.executor.resource.gpu.amount": "4", "spark.task.resource.gpu.amount": "1"}, 12),
    ],
)  # fmt: skip
def test_places_of_a_cluster(master: str, conf: dict[str, str], num_slots: int | None):
    assert num_rank_slots(master, conf) == num_slots


@pytest.mark.needs("horovod")
@pytest.mark.parametrize(
    ("master", "conf", "expected"),
    [
        ("yarn", {}, 2),
        ("k8s://https://host:6443", {"spark.executor.instances": "3"}, 3),
        ("yarn", {"spark.executor.cores": "4", "spark.task.cpus": "2"}, 4),
        ("yarn", {"spark.dynamicAllocation.enabled": "true"}, None),
        ("spark://host:7077", {}, None),
        ("local[3]", {}, 3),
    ],
)
def test_sparks_own_defaults_count_once_all_settings_are_known(master, conf, expected, monkeypatch):
    """Before that, spark-defaults.conf may set more executors or cores."""
    assert num_slots_of(master, conf, is_all=True) == expected
    section = SparkConfig(master=master, train=SparkApplicationConfig(conf=conf))
    asks_for_more = TrainConfig(num_workers=5, strategy="horovod", launcher="horovod_spark")
    if not master.startswith("local"):
        check_terms(asks_for_more, section)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    if expected is None:
        check_terms(asks_for_more, section)
        return
    with pytest.raises(UsageError, match=rf"training of 5 ranks, .* runs {expected} task\(s\) at a time"):
        check_terms(asks_for_more, section)
