"""The house rules as tests: who may import whom, no cycles, light imports; and sizes, which may only shrink.

`python tests/test_architecture.py` prints the report; `--update` writes today's sizes into the ratchet.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RATCHET = ROOT / "tests" / "architecture_ratchet.json"
MAY_IMPORT = {
    "shardmill": {"shardmill"},
    "etl": {"etl", "shardmill"},
    "train": {"train", "shardmill"},
    "pipeline": {"pipeline", "etl", "train", "shardmill"},
    "airflow_dags": {"airflow_dags", "shardmill"},
}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_DEPTH = 300, 50, 7, 8
# How many of our modules a reader of these entry points has to open at the most.
MAX_REACH = {"shardmill.reader": 22, "etl.job": 40, "train.worker": 45}
# Slow to import, or absent where only the reader is installed: never at the top of a module.
HEAVY = {"tensorflow", "keras", "horovod", "pyspark", "torch", "sklearn", "airflow"}
MAY_BE_HEAVY = {
    "airflow_dags/shardmill_dag.py": {"airflow"},
    "airflow_dags/operators.py": {"airflow"},
    "airflow_dags/run_folder.py": {"airflow"},
    "airflow_dags/spark_hook.py": {"airflow"},
    # What a user's model imports beside its framework.
    "train/layers/keras.py": {"keras"},
    "train/layers/torch.py": {"torch"},
    # A subclass of Keras's, imported when one is built.
    "train/backends/keras/sgd.py": {"keras"},
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
    for package in MAY_IMPORT:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    assert len(found) > 40
    return found


def imports_of(module: Module, *, only_at_import: bool) -> set[str]:
    """Names of modules that are imported at run time; with `only_at_import`, without those inside functions."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.relative}:{node.lineno} imports relatively"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        for child in ast.iter_child_nodes(node):
            if only_at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            visit(child)

    visit(module.tree)
    return found


def entries_of(module: Module) -> set[str]:
    """Modules that the registry entries of `module` name: loaded on first use."""
    calls = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    named = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Entry" and call.args)
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


def folder_circles() -> list[list[str]]:
    """Circles of the folders of one package that lie side by side."""
    folder_of = {name: str(module.path.parent.relative_to(ROOT)) for name, module in modules().items()}
    edges: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for name in modules():
        for other in own_imports(name):
            here, there = folder_of[name], folder_of[other]
            # A package's own files may use those of its subfolders, and the other way round.
            if here != there and not there.startswith(f"{here}/") and not here.startswith(f"{there}/"):
                edges[here].add(there)
    return circles(edges)


def test_registry_entries_are_no_way_around_the_import_rules():
    """An entry names a module of ours, and only one that the registry's package may import."""
    for module in modules().values():
        for target in entries_of(module):
            assert target in modules(), f"{module.relative}: no module {target}"
            assert target.partition(".")[0] in MAY_IMPORT[module.name.partition(".")[0]], f"{module.relative}: {target}"


def test_imports_go_one_way_only():
    wrong = [
        f"{module.relative} imports {name}"
        for module in modules().values()
        for name in sorted(imports_of(module, only_at_import=False))
        if name.partition(".")[0] in MAY_IMPORT
        and name.partition(".")[0] not in MAY_IMPORT[module.name.partition(".")[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_a_run_is_recorded_without_a_spark_session():
    assert "shardmill.jobs.spark" not in reach_of("shardmill.jobs.run_record")


def test_heavy_packages_are_imported_lazily():
    wrong = [
        f"{module.relative} imports {name} at its top"
        for module in modules().values()
        for name in sorted(imports_of(module, only_at_import=True))
        if name.partition(".")[0] in HEAVY - MAY_BE_HEAVY.get(module.relative, set())
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_its_place():
    silent = [
        module.relative for module in modules().values() if module.tree.body and not ast.get_docstring(module.tree)
    ]
    assert not silent, silent


def test_only_the_command_line_prints():
    wrong = [
        f"{module.relative}:{node.lineno}"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if module.relative != "pipeline/cli.py"
    ]
    assert not wrong, wrong


def test_nothing_unpickles():
    """No pickle by name, and none through a library's loader: `np.load` and `torch.load` must refuse it."""
    wrong = []
    for module in modules().values():
        found = {"pickle", "cloudpickle", "joblib", "marshal", "shelve", "dill"}
        wrong += [f"{module.relative}: {name}" for name in found & imports_of(module, only_at_import=False)]
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            settings = {each.arg: ast.unparse(each.value) for each in node.keywords}
            call, name = ast.unparse(node.func), node.func.attr
            refuses = (settings.get("allow_pickle") == "False") or (settings.get("weights_only") == "True")
            if name in ("read_pickle", "load_model") and settings.get("safe_mode") != "True":
                wrong.append(f"{module.relative}:{node.lineno}: {call}")
            if call in ("np.load", "numpy.load", "torch.load") and not refuses:
                wrong.append(f"{module.relative}:{node.lineno}: {call}")
    assert not wrong, wrong


def report() -> dict[str, int]:
    """Everything over a budget, and how much it is."""
    over: dict[str, int] = {}
    for module in modules().values():
        lines = len(module.path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            over[f"lines of {module.relative}"] = lines
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = f"{module.relative}:{node.name}"
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                over[f"lines of {name}"] = length
            arguments = node.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            count -= bool(arguments.args and arguments.args[0].arg in ("self", "cls"))
            if count > MAX_PARAMETERS:
                over[f"parameters of {name}"] = count
    for path in (ROOT / "tests").rglob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            over[f"lines of {path.relative_to(ROOT)}"] = lines
    for name, limit in MAX_REACH.items():
        if len(reach_of(name)) > limit:
            over[f"reach of {name}"] = len(reach_of(name))
    over.update({f"circle of {', '.join(group)}": len(group) for group in [*module_circles(), *folder_circles()]})
    for name in modules():
        depth = depth_of(name)
        if depth > MAX_DEPTH:
            over[f"import depth of {name}"] = depth
    return dict(sorted(over.items()))


@cache
def depth_of(name: str) -> int:
    """The longest chain of imports below a module; a circle counts as one link, and is reported by itself."""
    circle = next((group for group in module_circles() if name in group), [name])
    return 1 + max((depth_of(other) for other in own_imports(name) if other not in circle), default=-1)


def test_sizes_only_shrink():
    allowed, now = json.loads(RATCHET.read_text(encoding="utf-8")), report()
    grown = {name: size for name, size in now.items() if size > allowed.get(name, 0)}
    assert not grown, (
        f"over budget (file {MAX_FILE_LINES} lines, function {MAX_FUNCTION_LINES}, parameters {MAX_PARAMETERS}, "
        f"import depth {MAX_DEPTH}) and larger than in {RATCHET.name}: {grown}; split it, or in the same commit say "
        f"why not and run `python tests/test_architecture.py --update`"
    )
    # A record that is larger than the truth would let the size grow back unnoticed.
    stale = {name: size for name, size in allowed.items() if size > now.get(name, 0)}
    assert not stale, f"smaller now than in {RATCHET.name}: {stale}; run `python tests/test_architecture.py --update`"


if __name__ == "__main__":
    text = json.dumps(report(), indent=1)
    if "--update" in sys.argv:
        RATCHET.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
