"""`make test-for FILE...`: the tests that can see a file, by their own imports, cheapest first, with their time."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shardmill", "etl", "train", "pipeline", "airflow_dags", "scripts", "benchmarks", "tests")
COSTS = ROOT / "tests" / "costs.json"
"""Processor seconds of each test file by tier, of the last run with `--write-costs`."""
UNMEASURED_SECONDS = 10.0
"""Assumed of a file that came after that run."""
# "tests.train.models_under_test:linear", "shardmill.formats.parquet:PARQUET"
_TARGET = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")


@functools.cache
def files() -> dict[str, Path]:
    """Our modules and those of the tests, by name."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@dataclass(frozen=True)
class Named:
    """What a module names."""

    imports: frozenset[str]
    entries: frozenset[str]
    """Modules that strings of it name: targets of a registry, which run if somebody asks for them."""
    words: frozenset[str]
    """Words of its strings."""


@functools.cache
def named_by(name: str, *, is_on_the_way: bool = False) -> Named:
    """`is_on_the_way`: a package that runs because one of its modules is imported; nobody calls its functions."""
    imports: set[str] = set()
    entries: set[str] = set()
    words: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(files()[name].read_bytes())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            entries |= set(_TARGET.findall(node.value))
            words |= set(re.findall(r"\w+", node.value))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        # A docstring runs nothing.
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not (is_on_the_way and is_function):
            waiting += ast.iter_child_nodes(node)
    # `a.b.c` may be the object `c` of the module `a.b`.
    entries |= {each.rpartition(".")[0] for each in entries}
    ours = files().keys() - {name}
    return Named(frozenset(imports & ours), frozenset(entries & ours), frozenset(words))


@functools.cache
def distances(test: str) -> dict[str, int]:
    """How many imports lead from a test module to each module that it sees.

    Of the entries of a registry it sees those whose name it says, all of a registry that it imports itself.
    """
    found, waiting, words = {test: 0}, [(test, False)], set[str]()
    for name in _modules_of_fixtures(test):
        found[name] = 1
        waiting.append((name, False))
    on_the_way: set[str] = set()
    for name, is_on_the_way in waiting:
        named, distance = named_by(name, is_on_the_way=is_on_the_way), found[name] + 1
        following = set(named.imports)
        if name.startswith("tests."):
            words |= named.words
            following |= named.entries
        elif not is_on_the_way:
            following |= {each for each in named.entries if distance == 2 or each.rpartition(".")[2] in words}
            if not name.startswith("pipeline"):
                following -= {each for each in following if each.startswith("pipeline")}
        for other in sorted(following - (found.keys() - on_the_way)):
            found.setdefault(other, distance)
            on_the_way.discard(other)
            waiting.append((other, False))
        packages = {each.rsplit(".", count)[0] for each in following for count in range(1, each.count(".") + 1)}
        for package in sorted(packages & files().keys() - found.keys()):
            on_the_way.add(package)
            found[package] = distance
            waiting.append((package, True))
    return found


def _modules_of_fixtures(test: str) -> set[str]:
    """The conftests that define a fixture which a test takes, or the modules from which they import it."""
    arguments = {node.arg for node in ast.walk(ast.parse(files()[test].read_bytes())) if isinstance(node, ast.arg)}
    parents = {f"{test.rsplit('.', count)[0]}.conftest" for count in range(1, test.count(".") + 1)}
    found: set[str] = set()
    for conftest in parents & files().keys():
        for node in ast.parse(files()[conftest].read_bytes()).body:
            if isinstance(node, ast.ImportFrom) and node.module in files():
                found |= {node.module for alias in node.names if alias.name in arguments}
            elif isinstance(node, ast.FunctionDef) and node.name in arguments:
                found.add(conftest)
    return found


def named_tests(file: Path) -> list[Path]:
    """The test files that bear the name of a module or of its folder, in the tests of its package."""
    folder = ROOT / "tests" / file.relative_to(ROOT).parts[0]
    names = [f"test_{name}.py" for name in (file.stem, f"{file.parent.name}_{file.stem}", file.parent.name)]
    return sorted(path for path in folder.rglob("test_*.py") if path.name in names)


def costs_of(test: Path, tier: str) -> float:
    """Processor seconds of a test file in a tier and those below, measured or assumed."""
    measured = _costs().get(str(test.relative_to(ROOT)))
    tiers = {"fast": ("fast",), "test": ("fast", "test"), "drill": ("drill",), "all": ("fast", "test", "drill")}[tier]
    return UNMEASURED_SECONDS if measured is None else sum(measured.get(each, 0.0) for each in tiers)


@functools.cache
def _costs() -> dict[str, dict[str, float]]:
    return json.loads(COSTS.read_text(encoding="utf-8")) if COSTS.exists() else {}


def tests_for(changed: Sequence[Path], tier: str = "test") -> list[Path]:
    """The test files that can see any of these files: those of its name, then the cheapest, of equals the nearest."""
    wanted = {name for name, path in files().items() if path in changed}
    named = {test for file in changed if file.is_relative_to(ROOT) for test in named_tests(file)}
    found: dict[Path, tuple[bool, float, int, Path]] = {}
    for name, path in files().items():
        if path.name.startswith("test_") and (seen := distances(name).keys() & wanted):
            cost = costs_of(path, tier)
            if cost == 0:
                # No test of this tier is in it.
                continue
            found[path] = (path not in named, cost, min(distances(name)[each] for each in seen), path)
    return sorted(found, key=found.__getitem__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the tests, run none")
    parser.add_argument("--limit", type=float, default=float("inf"), help="processor seconds of all tests together")
    parser.add_argument("--tier", default="test", choices=("fast", "test", "drill", "all"))
    given, pytest_arguments = parser.parse_known_args()
    if missing := [str(file) for file in given.files if not file.exists()]:
        parser.error(f"no file {', '.join(missing)}")
    total, chosen = 0.0, []
    for test in tests_for([file.resolve() for file in given.files], given.tier):
        cost = costs_of(test, given.tier)
        if total + cost > given.limit:
            break
        total += cost
        chosen.append(str(test.relative_to(ROOT)))
        sys.stdout.write(f"{cost:7.1f} s  {chosen[-1]}\n")
    sys.stdout.write(f"{total:7.1f} s  {len(chosen)} files\n")
    sys.stdout.flush()
    if given.list or not chosen:
        return 0
    # Without xdist they run in this order.
    return subprocess.call(["pytest", "-x", "-q", "--tier", given.tier, *pytest_arguments, *chosen], cwd=ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
