"""The page for those who come from other libraries: its programs run, and read what the other library has read."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.lab.commands import ENVIRONMENT, ROOT
from tests.lab.datasets import write_images

PAGE = ROOT / "docs" / "coming-from.md"
NUM_IMAGES = 60
# Behind both programs: `before` is what the first one has left.
CHECKS = {
    "torchvision's ImageFolder": f"""
assert list(photos.class_names) == before["photos"].classes
assert photos.manifest.splits["train"].num_rows == len(before["photos"]) == {NUM_IMAGES}
assert tuple(images.shape[1:]) == tuple(before["images"].shape[1:]) == (3, 32, 32)
""",
    "WebDataset": f"""
assert photos.manifest.splits["train"].num_rows == {NUM_IMAGES} and list(photos.class_names) == ["0", "1", "2"]
# Small sources are enlarged here to the smallest size that is chosen.
assert images.shape[1:] == (32, 32, 3) and before["images"].shape[1:] == (16, 16, 3)
""",
    "petastorm": f"""
assert photos.manifest.counts.accepted == {NUM_IMAGES} and len(before["encoded"]) == 20
assert set(map(str, before["labels"].tolist())) < set(photos.class_names) == {{"0", "1", "2"}}
""",
    "Horovod's Spark estimators": """
assert result.summary["train"]["strategy"] == "horovod" and result.summary["train"]["world_size"] == 2
assert result.summary["etl"]["engine"] == "spark" and result.accuracy is not None
""",
    "MosaicML's Streaming": f"""
assert len(loader) == -(-{NUM_IMAGES} // 32) and images.shape[1:] == (3, 32, 32)
""",
    "PyTorch's FSDP2": """
assert result.summary["train"]["strategy"] == "torch_fsdp" and result.summary["train"]["world_size"] == 2
assert result.accuracy is not None and before["loss"].isfinite()
""",
    "Lightning": """
assert result.summary["train"]["strategy"] == "torch_ddp" and result.accuracy is not None
assert before["trainer"].global_step == 8, "two epochs of four batches"
""",
}
TABLES = ("DeepSpeed", "Megatron-LM")
"""Their sections have settings in place of programs."""
DRILL = "torchvision's ImageFolder"
"""The others run in `make test-all`."""
NOT_HERE = {"Horovod's Spark estimators", "MosaicML's Streaming"}


@dataclass(frozen=True)
class Section:
    """Two programs of the page."""

    title: str
    before: str
    after: str


def sections() -> list[Section]:
    """In the order of the page."""
    _, *found = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = dict(zip(found[::2], found[1::2], strict=True))
    assert not any("```" in texts.pop(title) for title in TABLES)
    programs = (re.findall(r"^```python\n(.*?)```", text, re.DOTALL | re.MULTILINE) for text in texts.values())
    return [Section(title, *both) for title, both in zip(texts, programs, strict=True)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in the form of each library."""
    folder = tmp_path_factory.mktemp("coming_from")
    write_images(folder / "photos" / "train", num_images=NUM_IMAGES)
    write_images(folder / "photos" / "val", num_images=15, seed=1)
    files = sorted((folder / "photos" / "train").rglob("*.png"))
    rows = [{"image": file.read_bytes(), "label": int(file.parent.name[-1])} for file in files]
    (folder / "tars").mkdir()
    for number in range(2):
        with tarfile.open(folder / "tars" / f"train-{number:06d}.tar", "w") as tar:
            for place in range(number, len(rows), 2):
                for suffix, data in (("png", rows[place]["image"]), ("cls", str(rows[place]["label"]).encode())):
                    member = tarfile.TarInfo(f"{place:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    (folder / "table").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "table" / "train.parquet", row_group_size=20)
    return folder


def test_every_section_has_two_programs_of_about_ten_lines():
    assert [section.title for section in sections()] == list(CHECKS)
    for section in sections():
        lines = [len(program.strip().splitlines()) for program in (section.before, section.after)]
        assert max(lines) <= 21 and lines[1] <= lines[0], section.title


def test_tables_name_settings_that_there_are():
    keys = set((ROOT / "tests" / "config_keys.txt").read_text().split())
    named = set(re.findall(r"`(train\.[\w.]+)", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 12 and named <= keys, named - keys


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(each, marks=pytest.mark.drill if each.title == DRILL else pytest.mark.exhaustive, id=each.title)
        for each in sections()
    ],
)
def test_a_section_does_what_it_says(section: Section, here: Path):
    before = "before = {}\n" if section.title in NOT_HERE else f"{section.before}\nbefore = dict(globals())\n"
    program = here / "program.py"
    program.write_text(f"{before}\n{section.after}\n{CHECKS[section.title]}")
    done = subprocess.run(
        [sys.executable, program], cwd=here, env=ENVIRONMENT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
