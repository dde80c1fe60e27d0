"""Reads the import graph of our modules from their sources, for tests/test_architecture.py."""

from __future__ import annotations

import ast
import gc
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "shardmill": {"shardmill"}, "etl": {"etl", "shardmill"}, "train": {"train", "shardmill"},
    "pipeline": {"pipeline", "etl", "train", "shardmill"}, "airflow_dags": {"airflow_dags", "shardmill"},
}  # fmt: skip

# Slow to import, or absent where only the reader is installed: never at the top of a module.
HEAVY = {
    *("tensorflow", "keras", "horovod", "pyspark", "torch", "jax", "sklearn", "scipy", "cleanlab", "airflow"),
    *("opentelemetry", "prometheus_client"),
}


@dataclass(frozen=True)
class Module:
    """One of our source files."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def relative(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def modules() -> dict[str, Module]:
    found = {}
    # Looking for garbage among so many objects takes three times as long as parsing.
    gc.disable()
    try:
        for package in MAY_IMPORT:
            for path in sorted((ROOT / package).rglob("*.py")):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    finally:
        gc.enable()
    assert len(found) > 40
    return found


def imports_of(module: Module, *, only_at_import: bool, with_types: bool = False) -> set[str]:
    """Names of modules that are imported at run time; with `only_at_import`, without those inside functions;
    `with_types`: also those that only a type checker imports.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.relative}:{node.lineno} imports relatively"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not with_types:
            return
        for child in ast.iter_child_nodes(node):
            if only_at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            visit(child)

    visit(module.tree)
    return found


def entries_of(module: Module) -> set[str]:
    """Modules that the registry entries and `OneOf`s of `module` name: loaded on first use."""
    calls = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call) and node.args)
    named = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("Entry", "OneOf"))
    targets = (call.args[0] for call in named)
    # The entry of a user's own object has no target yet.
    return {target.value.partition(":")[0] for target in targets if isinstance(target, ast.Constant) and target.value}


@cache
def own_imports(name: str) -> frozenset[str]:
    """Our modules that `name` imports, also inside functions; a package that is entered on the way runs as well."""
    found: set[str] = set()
    for imported in imports_of(modules()[name], only_at_import=False) & modules().keys() - {name}:
        found.add(imported)
        parents = [imported.rsplit(".", count)[0] for count in range(1, imported.count(".") + 1)]
        found.update(parent for parent in parents if parent in modules() and not f"{name}.".startswith(f"{parent}."))
    return frozenset(each for each in found if modules()[each].tree.body)


def reach_of(name: str) -> set[str]:
    """All of our modules that a reader who follows `name` has to open: imports at any depth, lazy ones as well.

    Registry entries do not count, here or for depth: an entry is what makes it unnecessary to read the others.
    """
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        following = own_imports(waiting.pop())
        waiting += following - seen
        seen |= following
    return seen - {name}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, sorted (Tarjan's strongly connected components, larger than one)."""
    found: list[list[str]] = []
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


@cache
def module_circles() -> list[list[str]]:
    return circles({name: set(own_imports(name)) for name in modules()})


@cache
def _with_types() -> dict[str, set[str]]:
    """What each module imports, if what only a type checker imports counts, too."""
    edges = {name: set(own_imports(name)) for name in modules()}
    for name, module in modules().items():
        named = imports_of(module, only_at_import=False, with_types=True) & modules().keys() - {name}
        edges[name] |= {each for each in named if modules()[each].tree.body}
    return edges


def type_circles() -> list[list[str]]:
    """Circles of modules whose types name each other: each file of one is read with the others."""
    return circles(_with_types())


def folder_circles() -> list[list[str]]:
    """Circles of folders that lie side by side; types count, too."""
    folder_of = {name: str(module.path.parent.relative_to(ROOT)) for name, module in modules().items()}
    edges: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for name in modules():
        for other in _with_types()[name]:
            here, there = folder_of[name], folder_of[other]
            # A package's own files may use those of its subfolders, and the other way round.
            if here != there and not there.startswith(f"{here}/") and not here.startswith(f"{there}/"):
                edges[here].add(there)
    return circles(edges)


@cache
def depth_of(name: str) -> int:
    """The longest chain of imports below a module; a circle counts as one link, and is reported by itself."""
    circle = next((group for group in module_circles() if name in group), [name])
    return 1 + max((depth_of(other) for other in own_imports(name) if other not in circle), default=-1)
