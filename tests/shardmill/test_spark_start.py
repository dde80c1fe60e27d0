"""Processes: children, what ends with its parent, Spark's start and settings, failpoints, the log."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile
import zipimport
from pathlib import Path

import pytest

from shardmill.child_process import ChildDied, ChildProcess, calling, start_child
from shardmill.errors import StorageError, UsageError
from shardmill.failpoints import FAILPOINTS, VARIABLE, failpoint
from shardmill.jobs.config import properties_file
from shardmill.jobs.line_log import GrowingFile, LineLog, open_to_append, read_lines, replace_lines
from shardmill.jobs.spark import REDACTION, protection_warning
from shardmill.jobs.spark_python import keep_zip_directories
from shardmill.stores import open_store
from tests.import_graph import ROOT
from tests.processes import LOCAL, hears_all_signals
from tests.services.marked import MARK

MAIN = calling("tests.programs.echo_messages:main", str(ROOT))


def started() -> ChildProcess:
    return start_child(MAIN, {**os.environ, "PYTHONPATH": str(ROOT)})


def is_gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.starts("program")
def test_messages_of_any_size_arrive_one_by_one():
    child = started()
    try:
        large = os.urandom(3_000_000)
        # It answers while we still send.
        sending = threading.Thread(target=lambda: [child.send({"n": n}, body) for n, body in enumerate((b"", large))])
        sending.start()
        assert child.receive() == ({"n": 0}, b"")
        assert child.receive() == ({"n": 1}, large)
        sending.join()
    finally:
        child.end()
    assert is_gone(child.process_id)
    child.end()


@pytest.mark.starts("program")
def test_ctrl_c_while_a_child_imports_is_its_parents():
    child = started()
    try:
        for _ in range(20):
            os.kill(child.process_id, signal.SIGINT)
            time.sleep(0.001)
        child.send({"n": 0}, b"still here")
        assert child.receive() == ({"n": 0}, b"still here")
    finally:
        child.end()


@pytest.mark.starts("program")
@pytest.mark.parametrize(("how", "status"), [({"exit": 3}, 3), ({"kill": 9}, -9), ({"kill": int(signal.SIGSEGV)}, -11)])
def test_the_exit_of_a_child_that_died_is_reported(how: dict[str, int], status: int):
    child = started()
    child.send(how)
    with pytest.raises(ChildDied, match=f"exit status {status}") as died:
        child.receive()
    assert died.value.status == status and is_gone(child.process_id)
    child.end()


@pytest.mark.starts("program")
def test_the_exit_of_a_child_that_ended_before_it_was_asked_is_reported():
    child = started()
    os.kill(child.process_id, signal.SIGKILL)
    os.waitid(os.P_PID, child.process_id, os.WEXITED | os.WNOWAIT)
    child.send({}, bytes(3_000_000))
    with pytest.raises(ChildDied, match="exit status -9"):
        child.receive()


@pytest.mark.starts("program")
def test_a_wait_ends_an_answer_that_takes_too_long():
    def wait(pipe: select.poll) -> None:
        if not pipe.poll(200):
            raise TimeoutError

    child = started()
    try:
        child.send({"sleep": 1000})
        with pytest.raises(TimeoutError):
            child.receive(wait)
    finally:
        child.end()
    assert is_gone(child.process_id)


COMMAND = "tests.programs.end_with_its_script"
ENDS = "terminated by SIGTERM; the current operation was finished\n"


def started_program(arguments: list[str], expected: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "EXPECTED": expected.strip(), "COMMAND": COMMAND, "PYTHON": sys.executable}
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        preexec_fn=hears_all_signals, cwd=Path(__file__).parents[2],
    )  # fmt: skip


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('"$PYTHON" -m "$COMMAND"; true', ENDS),
        ('"$PYTHON" -m "$COMMAND" & wait', "goes on orphaned\n"),
        ('nohup "$PYTHON" -m "$COMMAND"; true', "goes on orphaned\n"),
        ('setsid "$PYTHON" -m "$COMMAND"; true', "goes on orphaned\n"),
        ('set -m; "$PYTHON" -m "$COMMAND"; true', "goes on orphaned\n"),
    ],
    ids=["foreground", "background", "nohup", "setsid", "job"],
)
def test_a_command_in_the_foreground_of_a_script_ends_with_it(script: str, expected: str):
    shell = started_program(["bash", "-c", script], expected)
    assert shell.stdout is not None
    # The command is ready, and a child of the shell.
    assert int(shell.stdout.readline()) == shell.pid
    os.kill(shell.pid, signal.SIGKILL)
    assert shell.stdout.read() == expected


@pytest.mark.starts("program")
def test_the_end_of_the_thread_that_started_a_command_is_not_the_end_of_its_parent():
    expected = "goes on not orphaned\n"
    program = started_program([sys.executable, "-m", "tests.programs.start_from_a_thread", COMMAND], expected)
    assert program.stdout is not None
    assert program.stdout.read() == f"{program.pid}\n{expected}"


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("pyspark.zip", False),
        ("py4j-0.10.9-src.zip", False),
        ("spark-core_2.13-4.0.5.jar", False),
        ("my-pyspark.zip", True),
    ],
)
def test_the_next_task_reads_the_directories_of_users_archives_alone(tmp_path, monkeypatch, name, is_read):
    archive, package = tmp_path / name, f"zipped_{name.partition('.')[0].replace('-', '_')}"
    with zipfile.ZipFile(archive, "w") as file:
        for module in ("__init__", "first", "second"):
            file.writestr(f"{package}/{module}.py", f"NAME = {module!r}")
    monkeypatch.syspath_prepend(str(archive))
    assert importlib.import_module(f"{package}.first").NAME == "first"

    read, directory_of = [], zipimport._read_directory

    def count(path: str):
        read.append(path)
        return directory_of(path)

    monkeypatch.setattr(zipimport, "_read_directory", count)
    keep_zip_directories()
    importlib.invalidate_caches()
    assert importlib.import_module(f"{package}.second").NAME == "second", "what was not imported before still can be"
    # At once, or from Python 3.13 on at the next import.
    assert (str(archive) in read) == is_read
    for each in ("", ".first", ".second"):
        sys.modules.pop(package + each)


HARD = {
    "spark.x.plain": "2g",
    "spark.x.text": " a=b:c #d !e \\f\tg\nh ",
    "spark.x.more = than:a name": "äöü 漢字",
    "spark.x.empty": "",
    "spark.x.path": r"C:\u0041\n",
}


def test_the_file_is_private_and_gone_afterwards():
    before = os.umask(0)
    try:
        with properties_file(HARD) as path:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    finally:
        os.umask(before)
    assert not Path(path).exists()


def test_java_reads_what_was_written():
    # Our own reading of java.util.Properties' rules (load, in its documentation), for lines as we write them.
    def read(text: str) -> dict[str, str]:
        found, special = {}, {"n": "\n", "r": "\r", "t": "\t"}
        for line in text.splitlines():
            parts, escaped = [""], False
            for character in line:
                if escaped:
                    parts[-1] += special.get(character, character)
                elif character == "=" and len(parts) == 1:
                    parts.append("")
                elif character != "\\":
                    parts[-1] += character
                escaped = character == "\\" and not escaped
            found[parts[0]] = parts[1]
        return found

    with properties_file(HARD) as path:
        assert read(Path(path).read_text(encoding="utf-8")) == HARD


@pytest.mark.parametrize(
    ("master", "settings", "is_warned"),
    [
        ("local[2]", {}, False),
        ("spark://host:7077", {}, True),
        ("k8s://https://host", {"spark.authenticate": "false"}, True),
        ("yarn", {"spark.authenticate": "true"}, False),
    ],
)
def test_an_open_application_is_warned_about(master: str, settings: dict[str, str], is_warned: bool):
    assert (
        "spark.authenticate" in protection_warning(master, lambda name, default: settings.get(name, default))
    ) is is_warned


def test_the_shipped_settings_hide_what_a_run_hides():
    secure = Path(__file__).parents[2] / "examples" / "spark" / "secure.properties"
    lines = [line for line in secure.read_text().splitlines() if line and not line.startswith("#")]
    shipped = dict(line.split("=", 1) if "redaction" in line else line.split() for line in lines)
    # As java.util.Properties reads it.
    assert {name: re.sub(r"\\(.)", r"\1", shipped[name]) for name in REDACTION} == REDACTION
    assert {shipped[f"spark.{name}"] for name in ("authenticate", "network.crypto.enabled", "acls.enable")} == {"true"}


def start(master: str, *settings: str, **variables: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.start_spark", master, *settings],
        env=environment | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return " ".join(done.stdout.split())


@pytest.mark.drill
@pytest.mark.parametrize(
    ("master", "setting", "said"),
    [
        # The JVM itself refuses this one.
        ("nonsense://here", "spark.ui.enabled=false", "settings that its JVM accepts"),
        ("local[1]", "spark.driver.maxResultSize=much", "Failed to parse byte string: much"),
    ],
)
def test_a_wrong_setting_is_the_users(master: str, setting: str, said: str):
    line = start(master, setting)
    assert line.startswith(UsageError.__name__) and said in line, line


@pytest.mark.drill
def test_a_fault_of_the_machine_may_pass():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = start("local[1]", f"spark.driver.port={taken.getsockname()[1]}", "spark.port.maxRetries=0")
    assert line.startswith(StorageError.__name__) and "Address already in use" in line, line


@pytest.mark.drill
def test_a_local_master_of_spark_submit_is_reached_from_this_machine_alone(tmp_path: Path):
    """As Airflow's DAG starts a job for `spark.master = "local[2]"`."""
    command = [Path(sys.executable).with_name("spark-submit"), "--master", "local[2]", "where_spark_listens.py"]
    environment = {**os.environ, MARK: f"listens-{tmp_path.name}-{os.getpid()}"}
    done = subprocess.run(
        command, cwd=ROOT / "tests" / "programs", env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("address ")}
    assert done.returncode == 0 and found and found <= LOCAL, (found, done.stderr[-2000:])


@pytest.mark.starts("program")
def test_yarn_without_its_settings_is_reported_before_any_jvm_starts(tmp_path: Path):
    line = start("yarn", JAVA_HOME=str(tmp_path))
    assert line.startswith("UsageError spark.master = 'yarn', but neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set"), (
        line
    )
    # Where Spark's own script sets it, there is nothing to refuse here: it is the missing Java that is told.
    (tmp_path / "spark-env.sh").touch()
    assert "expected Java 17 or 21" in start("yarn", JAVA_HOME=str(tmp_path), SPARK_CONF_DIR=str(tmp_path))
    assert "expected Java 17 or 21" in start("yarn", JAVA_HOME=str(tmp_path), YARN_CONF_DIR=str(tmp_path))


def passes(setting: str) -> int:
    """How often a process passes `decode`, of five times, until it dies."""
    environment = {**os.environ, VARIABLE: setting}
    command = [sys.executable, "-m", "tests.programs.pass_a_failpoint"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    return done.stdout.count(b"\n") if done.returncode == -9 else -1


@pytest.mark.starts("program")
def test_a_process_dies_at_the_named_pass(tmp_path: Path):
    assert [passes("decode"), passes("decode:3"), passes("decode:9"), passes("")] == [1, 3, -1, -1]
    once = f"decode@{tmp_path}/once"
    assert [passes(once), passes(once)] == [1, -1]


def test_a_misspelt_failpoint_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "gc_delet")
    with pytest.raises(UsageError, match="expected NAME"):
        failpoint("gc_delete")


def test_every_failpoint_is_documented():
    table = (ROOT / "docs" / "failpoints.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)) == FAILPOINTS


def test_line_logs_on_a_store_without_append(s3_bucket: str):
    store, path = open_store(f"{s3_bucket}/logs"), "runs/r/events.jsonl"

    def numbers() -> list[int]:
        return [json.loads(line)["n"] for line in read_lines(store, path)]

    now = [0.0]
    log = LineLog(store, path, clock=lambda: now[0])
    log.append({"n": 1})
    assert numbers() == [1]
    log.append({"n": 2})
    assert numbers() == [1]
    # What is flushed outlives this process, line by line, though the object is not written again.
    for number in (3, 4):
        log.flush()
        assert numbers() == list(range(1, number))
        log.append({"n": number})
    assert len(list(store.list(f"{path}.parts"))) == 2 and len(store.read(path).splitlines()) == 1
    # Killed here: 4 was never flushed. The next log goes on behind what is there, and its object holds the parts.
    again = LineLog(store, path, clock=lambda: now[0])
    assert numbers() == [1, 2, 3]
    again.append({"n": 5})
    assert numbers() == [1, 2, 3, 5] and not list(store.list(f"{path}.parts"))
    again.append({"n": 6})
    again.flush()
    now[0] = 10.0
    again.append({"n": 7})
    again.append({"n": 8})
    assert numbers() == [1, 2, 3, 5, 6, 7]
    # A rewrite that was cut off before it deleted the parts.
    store.put(f"{path}.parts/{8:015d}", b'{"n": 2}\n')
    assert numbers() == [1, 2, 3, 5, 6, 7]
    again.close()
    assert numbers() == [1, 2, 3, 5, 6, 7, 8] and [file.path for file in store.list("")] == [path]
    replace_lines(store, path, read_lines(store, path)[:2])
    assert numbers() == [1, 2]


def test_a_log_on_a_disk_that_is_full_for_a_while_is_whole_afterwards(tmp_path: Path):
    said: list[str] = []
    log = LineLog(open_store(tmp_path), "events.jsonl", warn=said.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
        # The fourth line is written in part.
        for number in range(6):
            log.append({"n": number})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said) == 1 and "events.jsonl cannot be written; it will be retried: no space to write" in said[0], said
    log.append({"n": 6})
    log.close()
    assert [json.loads(line)["n"] for line in (tmp_path / "events.jsonl").read_bytes().splitlines()] == list(range(7))
    assert len(said) == 1


def test_a_log_that_a_store_refuses_at_the_end_says_so(s3_server: str):
    said: list[str] = []
    log = LineLog(open_store("s3://nobody-made-this/x"), "events.jsonl", warn=said.append)
    log.append({"n": 1})
    log.close()
    assert ["cannot be written; it will be retried" in said[0], "events.jsonl misses its last lines" in said[1]] == [
        True,
        True,
    ]


def test_a_place_that_takes_no_folder_is_named():
    with pytest.raises(StorageError, match="cannot access /proc/work/events.jsonl: no folder can be created there"):
        open_to_append(Path("/proc/work/events.jsonl"))


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path):
    (tmp_path / "events.jsonl").write_bytes(b'{"n": 1}\n{"n":')
    assert read_lines(open_store(tmp_path), "events.jsonl") == [b'{"n": 1}\n']


def test_what_is_in_a_local_file_is_not_held_in_memory(tmp_path: Path):
    log = GrowingFile(open_store(tmp_path), "log")
    tracemalloc.start()
    try:
        for _ in range(50):
            log.append(bytes(1_000_000))
        log.close()
        assert tracemalloc.get_traced_memory()[0] < 10_000_000
    finally:
        tracemalloc.stop()
    assert (tmp_path / "log").stat().st_size == 50_000_000
