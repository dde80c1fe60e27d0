"""The loops in examples/ train, and the one that can be stopped resumes at its step with another number of ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.loader.dataset import open_dataset
from tests.lab.commands import ENVIRONMENT
from tests.lab.datasets import make_dataset
from tests.services.marked import free_ports

LOOPS = Path(__file__).resolve().parent.parent / "examples" / "loops"


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("loops"))


def run(*command: object) -> str:
    return run_at_once(command)[0]


def run_at_once(*commands: tuple[object, ...]) -> list[str]:
    """What each of some processes prints."""
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    ended = [process.communicate(timeout=200) for process in started]
    assert not any(process.returncode for process in started), "".join(stderr[-3000:] for _, stderr in ended)
    return [stdout for stdout, _ in ended]


# Of a script that is called several times, in one process: most of its time are imports.
CALLS = """
import contextlib, json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    print("call", flush=True)
    with contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_calls(*calls: tuple[object, ...]) -> list[str]:
    """What each call of a script prints, one after the other."""
    printed = run("-c", CALLS, json.dumps([list(map(str, call)) for call in calls]))
    return printed.split("call\n")[1:]


def steps_of(printed: str) -> list[tuple[int, int]]:
    """The (epoch, step) of each step that a loop prints."""
    return [(int(epoch), int(step)) for epoch, step in re.findall(r"epoch (\d+) step (\d+) loss", printed)]


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (?:of rank 0 )?([\d.]+)", printed)]


def all_steps(uri: str) -> list[tuple[int, int]]:
    """Of two epochs."""
    num_steps = len(open_dataset(uri).batches("train", global_batch_size=32))
    return [(epoch, step) for epoch in range(2) for step in range(num_steps)]


def ddp(uri: str, checkpoint: Path, num_ranks: int, *more: object) -> tuple[list[tuple[int, int]], float]:
    """-> the (epoch, step) of its steps, and the sum of its weights at the end."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    printed = run(*launch, LOOPS / "torch_ddp.py", f"{uri}@1", "--checkpoint", checkpoint, *more)
    return steps_of(printed), float(re.findall(r"weights ([\d.]+)", printed)[0])


@pytest.mark.drill
def test_the_ddp_loop_resumes_in_an_epoch_with_another_number_of_ranks(uri: str, tmp_path: Path):
    steps, weights = ddp(uri, tmp_path / "whole.pt", 2)
    begun, _ = ddp(uri, tmp_path / "stopped.pt", 2, "--stop-after", 2)
    rest, resumed = ddp(uri, tmp_path / "stopped.pt", 1)
    assert begun + rest == steps and len(begun) == 2 and steps[2][0] == 0
    # Sums of one rank and of two differ by rounding.
    assert resumed == pytest.approx(weights, rel=1e-4)


@pytest.mark.exhaustive
def test_the_lightning_loop_neither_skips_nor_repeats_a_batch_after_a_resume(uri: str, tmp_path: Path):
    call = (LOOPS / "lightning_fit.py", f"{uri}@1", "--checkpoints", tmp_path)
    # In the middle of an epoch, and at its end.
    printed = run_calls((*call, "--stop-after", 2), (*call, "--stop-after", 3), call)
    assert [len(steps_of(each)) for each in printed] == [2, 1, 3]
    found = re.findall(r"epoch (\d+) step (\d+) loss .* ids (.*)", "".join(printed))
    loader = open_dataset(f"{uri}@1").batches("train", global_batch_size=32, seed=0)
    expected = [
        (batch.epoch, batch.step, sorted(batch.sample_ids[batch.weights > 0].tolist()))
        for _ in range(2)
        for batch in loader
    ]
    assert [(int(epoch), int(step), json.loads(ids)) for epoch, step, ids in found] == expected


@pytest.mark.exhaustive
def test_the_accelerate_loop_resumes_in_one_process_what_two_have_begun(uri: str, tmp_path: Path):
    call = (LOOPS / "accelerate_loop.py", f"{uri}@1", "--checkpoint")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    begun = run(*launch, *call, tmp_path / "stopped", "--stop-after", 2)
    rest = run(*call, tmp_path / "stopped")
    assert [*steps_of(begun), *steps_of(rest)] == all_steps(uri) and len(steps_of(begun)) == 2


@pytest.mark.exhaustive
def test_the_horovod_loop_resumes_in_one_process_what_two_have_begun(uri: str, tmp_path: Path):
    def loop(checkpoint: str) -> tuple[object, ...]:
        return (LOOPS / "horovod_loop.py", f"{uri}@1", "--checkpoint", tmp_path / checkpoint)

    start = ("-m", "horovod.runner.launch", "--gloo", "-np", 2, sys.executable)
    begun = run(*start, *loop("stopped.weights.h5"), "--stop-after", 2)
    rest = run(*loop("stopped.weights.h5"))
    assert [*steps_of(begun), *steps_of(rest)] == all_steps(uri) and len(steps_of(begun)) == 2
    losses = [losses_of(each) for each in (begun + rest, run(*loop("whole.weights.h5")))]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.exhaustive
def test_keras_on_torch_resumes_in_an_epoch(uri: str, tmp_path: Path):
    call = (LOOPS / "keras_fit_torch.py", uri, "--checkpoint")
    begun, rest, whole = run_calls(
        (*call, tmp_path / "stopped.keras", "--stop-after", 2), (*call, tmp_path / "stopped.keras"),
        (*call, tmp_path / "whole.keras"),
    )  # fmt: skip
    assert steps_of(begun + rest) == steps_of(whole) == all_steps(uri) and len(steps_of(begun)) == 2
    # Keras prints the mean over an epoch; those of the second one are of the same steps.
    assert losses_of(rest)[-3:] == pytest.approx(losses_of(whole)[-3:], abs=1e-3)


@pytest.mark.drill
def test_keras_fits_and_learns(uri: str):
    printed = run(LOOPS / "keras_fit.py", uri)
    losses = [float(loss) for loss in re.findall(r" - loss: ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < 0.8 * losses[0] and len(re.findall("val_loss", printed)) == 3


@pytest.mark.exhaustive
def test_the_jax_loop_resumes_in_one_process_what_two_have_begun(uri: str, tmp_path: Path):
    def loop(checkpoint: str, *more: object) -> tuple[object, ...]:
        return (LOOPS / "jax_loop.py", f"{uri}@1", "--checkpoint", tmp_path / checkpoint, *more)

    whole = run(*loop("whole.npz"))
    of_two = ("--coordinator", f"localhost:{free_ports(1)[0]}", "--num-processes", 2, "--stop-after", 2)
    begun, _ = run_at_once(*(loop("stopped.npz", *of_two, "--process", process) for process in range(2)))
    rest = run(*loop("stopped.npz"))
    assert steps_of(begun + rest) == steps_of(whole) and len(steps_of(begun)) == 2
    losses = [losses_of(each) for each in (begun + rest, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and losses[1][-1] < losses[1][0]
