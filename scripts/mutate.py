"""Changes a module in small ways and runs its nearest tests on each changed copy: a change that they pass is a gap.

`python scripts/mutate.py shardmill/mix.py` makes ten mutants; without a file, ten of each module that holds a promise.
The tree itself is never changed. Survivors that mean the same as the original are listed, each with its reason, in
tests/equivalent_mutants.toml.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.test_for import ROOT, costs_of, named_tests, tests_for

EQUIVALENTS = ROOT / "tests" / "equivalent_mutants.toml"
BETWEEN_PROCESSES = {
    "shardmill/child_process.py": ("tests/shardmill/test_child_process.py", "tests/etl/test_engines.py"),
    "train/strategies/torch_ddp.py": ("tests/train/test_torch_ddp.py", "tests/train/test_torch_buckets.py"),
}
"""Modules whose promises only tests that start processes see, and those tests."""
PROMISES = (
    "shardmill/epoch_plan.py", "shardmill/mix.py", "shardmill/dataset/commit.py", "shardmill/dataset/manifest.py",
    "shardmill/dataset/leases.py", "shardmill/dataset/maintenance/gc.py", "etl/units/write_unit.py",
    "shardmill/images/process.py", "etl/units/results.py", "train/checkpoints/checkpoint.py",
    "train/checkpoints/checkpoint_writer.py", "train/rank/session.py", "train/launching/watchdog.py",
    "train/launching/messages.py", "train/strategies/horovod.py", "train/published/export.py",
    "train/published/gate.py", "shardmill/formats/parquet.py", "shardmill/formats/tfrecord.py", *BETWEEN_PROCESSES,
)  # fmt: skip
SEED, COUNT = 0, 10
_OURS = ("shardmill", "etl", "train", "pipeline", "airflow_dags", "tests", "scripts")
_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    line: int
    was: str
    """The changed lines, without line breaks and indentation."""
    became: str
    is_call: bool
    """Whether a call has other arguments."""
    text: bytes
    """The whole module."""


def mutants_of(text: bytes) -> list[Mutant]:
    """All, without two of the same change."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: dict[tuple[str, str], Mutant] = {}
    for node, replacement in _changes(ast.parse(text)):
        assert (
            isinstance(node, ast.expr | ast.stmt | ast.keyword) and node.end_lineno and node.end_col_offset is not None
        )
        start = lines[node.lineno - 1] + node.col_offset
        stop = lines[node.end_lineno - 1] + node.end_col_offset
        around = slice(lines[node.lineno - 1], start), slice(stop, lines[node.end_lineno])
        became = text[around[0]] + replacement.encode() + text[around[1]]
        was = text[lines[node.lineno - 1] : lines[node.end_lineno]]
        changed = text[:start] + replacement.encode() + text[stop:]
        is_call = isinstance(node, ast.Call | ast.keyword) and replacement not in _FUNCTIONS.values()
        mutant = Mutant(node.lineno, _one_line(was), _one_line(became), is_call, changed)
        if mutant.was != mutant.became:
            found.setdefault((mutant.was, mutant.became), mutant)
    return list(found.values())


def _one_line(text: bytes) -> str:
    return " ".join(text.decode().split())


def choose(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """The same for the same seed, and the same for lines that an edit elsewhere did not touch; one of each line."""

    def place(mutant: Mutant) -> float:
        digest = hashlib.sha256(f"{seed}\n{mutant.was}\n{mutant.became}".encode()).digest()
        # Most calls with other arguments fail at once and show little: fewer of them.
        return int.from_bytes(digest) * (5 if mutant.is_call else 1)

    chosen: dict[int, Mutant] = {}
    for mutant in sorted(mutants, key=place):
        if len(chosen) < count and mutant.line not in chosen and _compiles(mutant):
            chosen[mutant.line] = mutant
    return [chosen[line] for line in sorted(chosen)]


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Nodes, and the source in the place of each. Not of asserts, annotations, decorators and texts."""
    for node in _visited(tree):
        match node:
            case ast.Compare(ops=operators):
                for number, operator in enumerate(operators):
                    changed = [*operators[:number], _OPERATORS[type(operator)](), *operators[number + 1 :]]
                    yield node, _unparse(node, ops=changed)
            case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in _OPERATORS:
                yield node, _unparse(node, op=_OPERATORS[type(operator)]())
            case ast.Constant(value=bool(value)):
                yield node, str(not value)
            case ast.Constant(value=int(value)):
                yield node, str(value + 1)
                yield node, str(value - 1) if value else "-1"
            case ast.Name(id=name) if name in _FUNCTIONS:
                yield node, _FUNCTIONS[name]
            case ast.Call(args=[first, second, *others]) if node.lineno == node.end_lineno and _has_order(node):
                yield node, _unparse(node, args=[second, first, *others])
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield test, _negated(test)
            case ast.comprehension(ifs=tests):
                yield from ((test, f"({_negated(test)})") for test in tests)
            case ast.keyword(arg=str()):
                yield node, "**{}"
            case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Delete():
                yield node, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield node, "pass"
            case ast.Continue() | ast.Break():
                yield node, "pass"


def _visited(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_type_check = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.Raise):
                yield child
            elif isinstance(child, ast.AST) and not isinstance(child, ast.Assert | ast.JoinedStr) and not is_type_check:
                yield from _visited(child)


def _unparse(node: ast.AST, **changed: object) -> str:
    return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **changed}))


def _has_order(call: ast.Call) -> bool:
    """Whether the arguments may not be exchanged by its definition."""
    is_starred = any(isinstance(each, ast.Starred) for each in call.args[:2])
    return not is_starred and not (isinstance(call.func, ast.Name) and call.func.id in ("max", "min", "cast"))


def _negated(test: ast.expr) -> str:
    is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return ast.unparse(test.operand if is_not else ast.UnaryOp(ast.Not(), test))


class Laboratory:
    """A copy of the tree, in which tests run on changed modules, each run in a fork that has imported nothing of ours.

    What the tests import of others is imported here, once.
    """

    def __init__(self) -> None:
        self.tier = "fast"
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        self.root = Path(self._folder.name)
        listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self._writes = 0

    def write(self, file: str, text: bytes) -> None:
        """Bytecode of a module is valid for its size and second: each text gets a second of its own."""
        self._writes += 1
        (self.root / file).write_bytes(text)
        os.utime(self.root / file, (time.time(), 1_600_000_000 + self._writes))

    def run(self, tests: Sequence[str], *, seconds: float = 600, preload: bool = False) -> str:
        """The test that failed, or "" if all passed. Without end: "time"."""
        output = self.root / "output"
        if not (child := os.fork()):
            self._run_tests(tests, output)
        end = time.monotonic() + seconds
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "time"
            time.sleep(0.05)
        said = output.read_text(encoding="utf-8", errors="replace")
        if preload:
            for name in (self.root / "imported").read_text(encoding="utf-8").split():
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        if ended[1] == 0:
            return ""
        failed = [line.split(" - ")[0] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return failed[0].partition(" ")[2] if failed else said[-2000:]

    def _run_tests(self, tests: Sequence[str], output: Path) -> None:
        os.setsid()
        status = 1
        try:
            with output.open("wb", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout = sys.stderr = io.TextIOWrapper(open(1, "wb", closefd=False), line_buffering=True)  # noqa: SIM115
            os.chdir(self.root)
            for name in [name for name in os.environ if name.startswith("PYTEST_")]:
                del os.environ[name]
            # What a test costs or starts kills no mutant.
            os.environ |= {"PYTHONPATH": str(self.root), "SHARDMILL_STARTS": "record", "SHARDMILL_FULL": ""}
            for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
                del sys.modules[name]
            sys.path[:] = [str(self.root), *(each for each in sys.path if Path(each).resolve() != ROOT)]
            options = ["-x", "-q", "--tier", self.tier, "-p", "no:cacheprovider"]
            status = int(pytest.main([*options, *tests], plugins=[_Imported(self.root / "imported")]))
            sys.stdout.flush()
        finally:
            os._exit(status)


class _Imported:
    """Writes which packages the tests have imported, before tests/conftest.py may end the process."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_sessionfinish(self) -> None:
        packages = {name.partition(".")[0] for name, module in list(sys.modules.items()) if _is_installed(module)}
        self._file.write_text("\n".join(sorted(packages)), encoding="utf-8")


def _is_installed(module: object) -> bool:
    return "site-packages" in (getattr(module, "__file__", None) or "") and not module.__name__.startswith("_")


def tests_of(file: str, limit: float) -> list[str]:
    """Those of the module's name, then as many others that see it as fit into these processor seconds."""
    tests = named_tests(ROOT / file)
    for test in tests_for([ROOT / file], "fast"):
        if test not in tests and (cost := costs_of(test, "fast")) and cost <= limit:
            limit -= cost
            tests.append(test)
    return [str(test.relative_to(ROOT)) for test in tests]


def report(laboratory: Laboratory, file: str, tests: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Prints a line for each mutant; returns the survivors that are not listed as equivalent."""
    text = (ROOT / file).read_bytes()
    listed = tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8")).get(file, [])
    equivalent = {(each["was"], each["became"]): each["reason"] for each in listed}
    laboratory.write(file, text)
    began = time.monotonic()
    if not tests or laboratory.run(tests, preload=True):
        said = (laboratory.root / "output").read_text(encoding="utf-8", errors="replace") if tests else "no tests"
        raise SystemExit(f"{said[-3000:]}\n{file}: its tests fail without a change")
    seconds = 30 + 5 * (time.monotonic() - began)
    survivors: list[Mutant] = []
    numbers = {"killed": 0, "equivalent": 0, "SURVIVED": 0}
    for mutant in choose(mutants_of(text), count, seed):
        laboratory.write(file, mutant.text)
        if killer := laboratory.run(tests, seconds=seconds):
            verdict = "killed"
        elif killer := equivalent.get((mutant.was, mutant.became), ""):
            verdict = "equivalent"
        else:
            verdict = "SURVIVED"
            survivors.append(mutant)
        numbers[verdict] += 1
        _say(f"{verdict:10} {file}:{mutant.line}  {killer}\n    - {mutant.was}\n    + {mutant.became}")
    laboratory.write(file, text)
    _say(f"{file}: " + ", ".join(f"{number} {verdict}" for verdict, number in numbers.items()))
    return survivors


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", default=PROMISES)
    parser.add_argument("--tests", nargs="+", help="default: those of the module's name")
    parser.add_argument("--limit", type=float, default=0, help="processor seconds of other tests that see the module")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    _say(f"seed {given.seed}")
    laboratory = Laboratory()
    survivors: list[Mutant] = []
    for file in given.files:
        laboratory.tier = "test" if file in BETWEEN_PROCESSES else "fast"
        tests = given.tests or BETWEEN_PROCESSES.get(file) or tests_of(file, given.limit)
        survivors += report(laboratory, file, tests, given.count, given.seed)
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
