"""The page of `shardmill mislabels`: the images whose labels are suspect, the mistakes, and the classes they are in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.report.data import Picture
from pipeline.report.page import as_html_file, environment
from pipeline.report.thumbnail import thumbnail
from shardmill.data_quality.mislabels import ClassFaults, ConfidentMistake, Mislabels, SuspectLabel
from shardmill.dataset.dataset import Dataset
from shardmill.loader.samples import samples_by_id

MAX_SUSPECTS, MAX_MISTAKES = 120, 48
MAX_CLASSES, IMAGES_PER_CLASS = 12, 6

Found = SuspectLabel | ConfidentMistake


@dataclass(frozen=True, slots=True)
class ClassPictures:
    """One class with faults, and some of their images."""

    faults: ClassFaults
    pictures: tuple[Picture, ...]


def mislabels_page(found: Mislabels, name: str, images: Dataset) -> str:
    """The page as HTML. `name`: of the predictions; `images`: the dataset that was predicted."""
    suspects, mistakes = found.suspects[:MAX_SUSPECTS], found.mistakes[:MAX_MISTAKES]
    classes = [each for each in found.classes[:MAX_CLASSES] if each.num_likely or each.num_mistaken]
    of_class = {each.class_name: _of_class(found, each.class_name) for each in classes}
    wanted = {
        each.sample_id: each for each in (*suspects, *mistakes, *(one for some in of_class.values() for one in some))
    }
    pictures = _pictures(images, wanted.values())
    page = environment().get_template("mislabels.html").render(
        found=found,
        name=name,
        dataset=f"{images.pin.uri}@{images.pin.version}",
        suspects=[(pictures[each.sample_id], each) for each in suspects],
        mistakes=[(pictures[each.sample_id], each) for each in mistakes],
        classes=[
            ClassPictures(each, tuple(pictures[one.sample_id] for one in of_class[each.class_name])) for each in classes
        ],
    )  # fmt: skip
    return as_html_file(page)


def _of_class(found: Mislabels, class_name: str) -> tuple[Found, ...]:
    mine = (each for each in (*found.suspects, *found.mistakes) if each.given_label == class_name)
    return tuple({each.sample_id: each for each in mine}.values())[:IMAGES_PER_CLASS]


def _pictures(images: Dataset, wanted: Iterable[Found]) -> dict[int, Picture]:
    """By sample id."""
    by_id = {each.sample_id: each for each in wanted}
    pictures: dict[int, Picture] = {}
    for sample_id, sample in samples_by_id(images, by_id.values()).items():
        png, is_small = thumbnail(sample.image_HWC)
        each = by_id[sample_id]
        answer = each.suggested_label if isinstance(each, SuspectLabel) else each.prediction
        pictures[sample_id] = Picture(f"{each.given_label} → {answer}", sample.source, png, is_small)
    return pictures
