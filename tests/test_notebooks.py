"""The notebooks run from top to bottom, and what they store is what they output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from scripts.docs_site.notebooks import notebook_page
from scripts.run_notebooks import IN_ORDER, NOTEBOOKS, read_notebook, run_notebook
from tests.lab.scale import exhaustive

# In the notebook's own names, behind its last cell.
CLAIMS = {
    "explore": """
assert manifest.counts.listed == manifest.counts.accepted + manifest.counts.rejected == 603
reasons = sorted(rejection.reason for rejection in rejections)
assert reasons == ["empty_file", "not_an_image", "truncated"]
assert all(Path("digits", source).exists() for source in source_of.values() if source != "3/0003.png")
assert sum(map(len, images_by_class.values())) == manifest.splits["train"].num_rows
assert (older.manifest.version, newer.manifest.version) == (1, 2) and len(changes) == 101
assert not report.problems
# Nothing is new: a bar and lines, then what a dataset shows of itself.
shardmill.etl("digits", workdir="digits-work")
""",
    "train": """
assert exactly_once_on_1 and exactly_once_on_2 and same_global_batches
steps_per_epoch = len(steps_of_1)
assert 0 < num_before - steps_per_epoch < steps_per_epoch, "in the middle of epoch 1"
assert resumed.sample_ids == undisturbed.sample_ids[num_before:] and len(resumed.sample_ids) > steps_per_epoch
assert stopped.sample_ids == undisturbed.sample_ids[:num_before]
assert stopped.losses + resumed.losses == undisturbed.losses
assert same_samples and same_weights
for epoch in range(3):
    steps = undisturbed.sample_ids[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch]
    assert sorted(sum(steps, [])) == sorted(ids_of_1)
assert undisturbed.sample_ids[:steps_per_epoch] != undisturbed.sample_ids[steps_per_epoch : 2 * steps_per_epoch]
assert accuracy > 0.8 and num_seen == manifest.splits["validation"].num_rows
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both run in it, in order, as a reader would run them."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.drill
@pytest.mark.parametrize("name", [IN_ORDER[0], *map(exhaustive, IN_ORDER[1:])])
def test_a_notebook_runs_and_keeps_its_claims(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    if name == "train" and not (folder / "digits-work" / "dataset").exists():
        run_notebook(read_notebook("explore"), folder)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(NOTEBOOKS.parents[1]), os.getenv("PYTHONPATH"))))
    )
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(folder / "settings"))
    stored, notebook = read_notebook(name), read_notebook(name)
    notebook.cells.append(new_code_cell(CLAIMS[name], metadata={"tags": ["varies"]}))
    done = run_notebook(notebook, folder)
    if name == "explore":
        progress, dataset = (output.data["text/html"] for output in done.cells[-1].outputs)
        assert "<summary>shardmill.etl digits: done in " in progress and "etl: skipped" in progress
        assert "699 accepted" in dataset and dataset.count("<img ") == 1
    # If this fails because the notebook was meant to change: python -m scripts.run_notebooks
    assert texts(stored) == texts(done)


def texts(notebook: NotebookNode) -> list[tuple[str, str]]:
    """What cells print or show as text, without those that may differ between machines."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and "varies" not in cell.metadata.get("tags", []):
            for output in cell.outputs:
                text = output.text if output.output_type == "stream" else output.data["text/plain"]
                found.append((cell.id, text))
    return found


def test_all_notebooks_are_run_and_shown():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(IN_ORDER)
    for name in IN_ORDER:
        page = notebook_page(f"{name}.ipynb")
        # Figures first of all: a notebook whose outputs were cleared shows none.
        assert "](data:image/png;base64," in page and "```text\n" in page
        assert not any(path in page for path in ("/tmp/", "/home/", "/root/", str(NOTEBOOKS.parents[1])))
