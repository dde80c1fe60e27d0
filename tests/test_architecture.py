"""The house rules as tests: who may import whom, no cycles, light imports; and sizes, which may only shrink.

`python tests/test_architecture.py` prints the report; `--update` writes today's sizes into the ratchet.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import cache

import pytest

from tests.import_graph import (
    HEAVY,
    MAY_IMPORT,
    ROOT,
    depth_of,
    entries_of,
    folder_circles,
    imports_of,
    module_circles,
    modules,
    reach_of,
    type_circles,
)
from train.launching import LAUNCHERS
from train.strategies import STRATEGIES

NAMES = STRATEGIES.entries.keys() | LAUNCHERS.entries.keys()
RATCHET = ROOT / "tests" / "architecture_ratchet.json"
# A file or a function may tell one story; what has no story to tell is far smaller.
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_DEPTH = 600, 120, 7, 9
# Of the modules whose types name each other; the ratchet records each such circle.
MAX_TYPE_CIRCLE = 5
# How many of our modules somebody has to open at the most who wants to read a dataset.
# Of the reader, nine are the package of augmentation, which nothing else needs.
MAX_REACH = {"shardmill.loader.reader": 30}
MAY_BE_HEAVY = {
    "airflow_dags/factory.py": {"airflow"},
    "airflow_dags/operators.py": {"airflow"},
    "airflow_dags/predictions.py": {"airflow"},
    "airflow_dags/run_folder.py": {"airflow"},
    "airflow_dags/spark_hook.py": {"airflow"},
    "airflow_dags/triggers.py": {"airflow"},
    # What a user's model imports beside its framework.
    "train/layers/keras.py": {"keras"},
    "train/layers/torch.py": {"torch"},
    "train/models/small_cnn_torch.py": {"torch"},
    "train/models/vit_torch.py": {"torch"},
    # Imported on a rank, by a strategy.
    "train/models/tensor_plans.py": {"torch"},
}


@pytest.fixture(scope="module", autouse=True)
def graph() -> None:
    """Read once for all tests of this file: nobody's cost."""
    module_circles()
    type_circles()
    files_that_test_strategies()


@pytest.fixture(scope="module", autouse=True)
def parsed() -> None:
    """All sources, before the first test is measured."""
    modules()


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
    """No pickle by name, and none through a library's loader: `np.load` and `torch.load` must refuse it.

    CIFAR's batches are pickles, and their reader's `find_class` knows stand-ins alone.
    """
    wrong = []
    for module in modules().values():
        found = {"pickle", "cloudpickle", "joblib", "marshal", "shelve", "dill"}
        if module.relative != "etl/sources/kinds/raw_pixels.py":
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


@cache
def files_that_test_strategies() -> dict[str, ast.Module]:
    """The test files that name the registries, or some of their entries."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    }
    return {
        file: ast.parse(text)
        for file, text in sorted(texts.items())
        if "STRATEGIES" in text or "LAUNCHERS" in text or sum(f'"{name}"' in text for name in NAMES) > 2
    }


def test_strategies_and_launchers_are_multiplied_in_the_array_alone():
    """Who adds a strategy adds a row to tests/train/test_array.py, never an axis: products are for `make test-all`."""
    wrong = []
    for file, tree in files_that_test_strategies().items():
        for node in tree.body:
            marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            axes = [mark for mark in marks if isinstance(mark, ast.Call) and "parametrize" in ast.unparse(mark.func)]
            texts = {each.value for axis in axes for each in ast.walk(axis) if isinstance(each, ast.Constant)}
            is_multiplied = len(axes) > 1 or any("product(" in ast.unparse(axis) for axis in axes)
            is_axis = len(texts & NAMES) > 2 or any(
                name in ast.unparse(axis) for axis in axes for name in ("STRATEGIES", "LAUNCHERS")
            )
            if is_axis and is_multiplied and not any("exhaustive" in ast.unparse(mark) for mark in marks):
                wrong.append(f"{file}: {node.name}")
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
    over.update({f"circle of types of {', '.join(group)}": len(group) for group in type_circles()})
    for name in modules():
        depth = depth_of(name)
        if depth > MAX_DEPTH:
            over[f"import depth of {name}"] = depth
    return dict(sorted(over.items()))


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


def test_no_circle_of_types_is_large():
    """The ratchet allows the circles that it records; none of them may have more files than a reader can hold."""
    large = [group for group in type_circles() if len(group) > MAX_TYPE_CIRCLE]
    assert not large, f"name a registry by text (`OneOf`), or move what one of them needs of the others: {large}"


if __name__ == "__main__":
    text = json.dumps(report(), indent=1)
    if "--update" in sys.argv:
        RATCHET.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
