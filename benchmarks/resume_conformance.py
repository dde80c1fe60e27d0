"""Kills data loaders at random steps, resumes them, and counts rows lost, repeated and out of order.

python benchmarks/resume_conformance.py [--only shardmill grain] [--seeds 1 2 3] [--page PAGE] [--adapter FILE]

Every rank is a process. At a step drawn from the seed it saves the loader's state, as its documentation says, reads on
and is ended by SIGKILL a few steps later (even seeds: it stops reading and ends by itself). New processes resume from
the states, at the same or at another world size. What they read is compared with an uninterrupted run. Loaders are
adapters in `resume_peers/`; peers are installed by uv from their scripts, each into an environment of its own. Results
of earlier calls are kept in a JSON file beside the page, whose tables are written anew.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from peer_script import install, python_of, version_of
from results import hardware
from resume_counts import Epoch, count, count_uninterrupted
from resume_peers.common import EPOCHS, GLOBAL_BATCH_SIZE, NOT_SUPPORTED, NUM_ROWS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks" / "resume_conformance.md"
SCENARIOS = {"2 -> 2 -> 2": (2, 2, 2), "2 -> 3": (2, 3), "4 -> 2": (4, 2)}
"""World sizes: a run is interrupted, and resumed at the next one."""
RUN_SECONDS = 300
BEGIN, END = "<!-- results -->\n", "<!-- /results -->\n"
"""Between them the script writes the page."""
STEPS = NUM_ROWS // GLOBAL_BATCH_SIZE - 1
"""Of an epoch in which a run may be interrupted: not in its last two."""


@dataclass(frozen=True)
class Adapter:
    """A loader, by the script that opens it."""

    name: str
    title: str
    script: Path
    variant: str = ""

    @cached_property
    def python(self) -> str:
        """Of an environment with what the script declares; ours if it declares nothing."""
        if not self.script.read_text().startswith("# /// script"):
            return sys.executable
        install(self.script)
        return python_of(self.script)

    @property
    def version(self) -> str:
        """The release that its script asks for, first of all; else ours, or none of a script without a title."""
        return version_of(self.script) or (importlib.metadata.version("shardmill") if self.title else "")

    def start(self, *arguments: object, log: Path, port: int = 0) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        paths = [str(HERE / "resume_peers"), *([str(HERE.parent)] if self.python == sys.executable else [])]
        quiet = {"DO_NOT_TRACK": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        env = {**inherited, **quiet, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [self.python, str(self.script), *map(str, arguments)]
        with log.open("w") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)


def _adapter(name: str, title: str, script: str, variant: str = "") -> Adapter:
    return Adapter(name, title, HERE / "resume_peers" / f"{script}.py", variant)


ADAPTERS = (
    _adapter("shardmill", "shardmill `torch_loader`", "shardmill_torch"),
    _adapter("torchdata", "torchdata StatefulDataLoader", "torchdata_stateful"),
    _adapter("hf", "Hugging Face datasets, in stored order", "hf_datasets"),
    _adapter("hf_shuffle", "Hugging Face datasets, `shuffle()`", "hf_datasets", "shuffle"),
    _adapter("hf_shuffle_alone", "Hugging Face datasets, `shuffle()`, no workers", "hf_datasets", "shuffle_alone"),
    _adapter("litdata", "litdata", "litdata_chunks"),
    _adapter("mosaic", "MosaicML Streaming", "mosaic"),
    _adapter("lancedb", "LanceDB StreamingDataset", "lancedb_stream"),
    _adapter("webdataset", "webdataset", "webdataset_tar"),
    _adapter("grain", "grain MapDataset", "grain_records"),
    _adapter("grain_elastic", "grain ElasticIterator (experimental)", "grain_records", "elastic"),
)


class Fault(Exception):
    """A run that did not end as it should: what its loader said."""


@dataclass(frozen=True)
class Stop:
    """Where a run ends before its time: it saves its state after this step."""

    epoch: int
    step: int
    kill_after: int | None
    """Steps from there to SIGKILL; None: it stops by itself."""


def draw_stops(seed: int, number: int) -> list[Stop]:
    """`number` places in a training, in its order; the same for every loader."""
    draws = random.Random(seed)
    places = sorted(draws.sample(range(EPOCHS * STEPS), number))
    return [Stop(*divmod(place, STEPS), draws.randint(1, 5) if seed % 2 else None) for place in places]


def train(adapter: Adapter, own: Path, worlds: Sequence[int], stops: Sequence[Stop], scratch: Path) -> list[Epoch]:
    """A training of one run for each world size, interrupted at the stops between them: what it read of each epoch."""
    epochs: list[list[Any]] = [[] for _ in range(EPOCHS)]
    begin, states = (0, 0), []
    for world, stop in zip(worlds, [*stops, None], strict=True):
        folder = Path(tempfile.mkdtemp(dir=scratch))
        _run(adapter, own, world, begin, stop, states, folder)
        ranks = [[json.loads(line) for line in (folder / f"{rank}.steps").open()] for rank in range(world)]
        last = EPOCHS if stop is None else stop.epoch + 1
        for epoch in range(begin[0], last):
            steps = [[numbers for of, numbers in rank if of == epoch] for rank in ranks]
            if stop and epoch == stop.epoch:
                # What was read after the state was saved is lost with the weights.
                steps = [rank[: stop.step + 1 - (begin[1] if epoch == begin[0] else 0)] for rank in steps]
            epochs[epoch].append(steps)
        if stop:
            begin, states = (stop.epoch, stop.step + 1), [folder / f"{rank}.state" for rank in range(world)]
    return epochs


def _run(
    adapter: Adapter, own: Path, world: int, begin: tuple[int, int], stop: Stop | None, states: list[Path], folder: Path
) -> None:
    """The ranks of one run, until all have ended. Raises Fault."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--own", own, "--out", folder, "--world-size", world, "--variant", adapter.variant]
    arguments += ["--resume-epoch", begin[0], "--states", *states] if states else []
    if stop:
        done = begin[1] if stop.epoch == begin[0] else 0
        arguments += ["--save-epoch", stop.epoch, "--save-step", stop.step - done]
        arguments += [] if stop.kill_after is None else ["--kill-after", stop.kill_after]
    ranks = adapter.start(*arguments, log=folder / "all.log", port=port)
    try:
        ranks.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        raise Fault(f"failed: the ranks had not ended after {RUN_SECONDS} s") from None
    finally:
        # Its ranks and their workers, too, where any are left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    if not (folder / "codes.json").exists():
        raise Fault(f"failed: {_last_line(folder / 'all.log')}")
    expected = 0 if stop is None or stop.kill_after is None else -signal.SIGKILL
    for rank, code in enumerate(json.loads((folder / "codes.json").read_text())):
        if code != expected:
            said = _last_line(folder / f"{rank}.log")
            raise Fault(f"not supported: {said}" if code == NOT_SUPPORTED else f"failed: {said}")


def _last_line(log: Path) -> str:
    return (log.read_text().strip().splitlines() or [""])[-1]


def measure(adapter: Adapter, seeds: Sequence[int], scratch: Path) -> dict[str, Any]:
    """Counts of an uninterrupted training, and of each scenario for each seed; or why there are none. Raises Fault."""
    own = scratch / adapter.name
    if adapter.start("--own", own, "--write", log=scratch / "write.log").wait():
        raise Fault(f"the rows could not be written: {_last_line(scratch / 'write.log')}")
    found: dict[str, Any] = {
        "version": adapter.version,
        "measured_on": f"{datetime.now(UTC):%Y-%m-%d}",
        "seeds": list(seeds),
    }
    uninterrupted: dict[int, list[Epoch]] = {}
    for name, worlds in SCENARIOS.items():
        first, counts = worlds[0], []
        if first not in uninterrupted:
            uninterrupted[first] = train(adapter, own, [first], [], scratch)
            alone = asdict(count_uninterrupted(uninterrupted[first], NUM_ROWS))
            found.setdefault("uninterrupted", [{key: alone[key] for key in ("lost", "repeated", "unequal")}])
        for seed in seeds:
            stops = draw_stops(seed, len(worlds) - 1)
            try:
                result = count(train(adapter, own, worlds, stops, scratch), uninterrupted[first])
                counts.append(asdict(result))
            except Fault as fault:
                result = str(fault)
                counts.append(result)
            print(f"{adapter.name}, {name}, seed {seed}, {stops}: {result}", file=sys.stderr)
            if str(result).startswith("not supported"):
                break
        found[name] = counts
    return found


def main() -> None:
    arguments = _parse_arguments()
    results_file = arguments.page.with_suffix(".json")
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    for adapter in arguments.adapters:
        print(f"{adapter.name}: measuring", file=sys.stderr)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found = measure(adapter, arguments.seeds, Path(scratch))
            except (Fault, subprocess.CalledProcessError) as fault:
                print(f"{adapter.name} is left out: {fault}", file=sys.stderr)
                continue
        print(json.dumps({adapter.name: found}))
        if arguments.adapter is None:
            results |= {adapter.name: found, "hardware": hardware()}
            results_file.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.adapter is None:
        before, _, rest = arguments.page.read_text().partition(BEGIN)
        arguments.page.write_text(before + BEGIN + _tables(results) + END + rest.partition(END)[2])


def _tables(results: dict[str, Any]) -> str:
    """The results in Markdown, with a note for each reason that a cell has instead of counts."""
    reasons: list[str] = []

    def cell(found: list[Any], seeds: list[int]) -> str:
        counted = [each for each in found if not isinstance(each, str)]
        ranges = [sorted({counts[key] for counts in counted}) for key in counted[0]] if counted else []
        texts = [" / ".join(str(least) if not more else f"{least} to {more[-1]}" for least, *more in ranges)]
        for seed, reason in zip(seeds, found, strict=False):
            if isinstance(reason, str):
                reasons.extend({reason}.difference(reasons))
                kind = reason.partition(":")[0]
                texts.append(f"{f'seed {seed} ' if counted else ''}{kind} ({reasons.index(reason) + 1})")
        return "; ".join(dict.fromkeys(filter(None, texts)))

    columns = ["uninterrupted", *SCENARIOS]
    table = [["loader", "version", "measured", "seeds", *columns], ["---"] * (4 + len(columns))]
    for adapter in ADAPTERS:
        if adapter.name in results:
            found = results[adapter.name]
            told = [found["version"], found["measured_on"], " ".join(map(str, found["seeds"]))]
            table.append([adapter.title, *told, *(cell(found[key], found["seeds"]) for key in columns)])
    lines = [f"{results['hardware']}.", "", *(f"| {' | '.join(row)} |" for row in table), ""]
    lines += [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in ADAPTERS]
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="with the results of all calls in a JSON file beside it"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=names,
        default=names,
        help="loaders to measure; all by default, none writes the page",
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--adapter", type=Path, help="a script of your own, instead; its counts are printed alone")
    arguments = parser.parse_args()
    if arguments.adapter and not arguments.adapter.is_file():
        parser.error(
            f"--adapter {arguments.adapter}: no such file; expected a script as benchmarks/resume_peers/ has them"
        )
    if not arguments.adapter and not arguments.page.is_file():
        parser.error(f"--page {arguments.page}: no such page; expected one like {PAGE}, whose tables are replaced")
    own = arguments.adapter and [Adapter(arguments.adapter.stem, "", arguments.adapter.absolute())]
    arguments.adapters = own or [each for each in ADAPTERS if each.name in arguments.only]
    return arguments


if __name__ == "__main__":
    main()
