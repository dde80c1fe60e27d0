"""Finds labels that are likely wrong, the model's most confident mistakes, and the classes that both are in.

Confident learning (C. Northcutt et al., Confident Learning: Estimating Uncertainty in Dataset Labels, JAIR 70, 2021) by
cleanlab, on probabilities of classifiers that have not seen the row.
Shape legend: N rows, M rows of classes with enough images, K such classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.data_quality.predicted_rows import PredictedRows, out_of_sample_probabilities
from shardmill.dataset.dataset import open_pinned
from shardmill.errors import ShardmillError, UsageError
from shardmill.html import picture, text
from shardmill.result import Result, Rows
from shardmill.values import DatasetPin
from shardmill.words import counted

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_IMAGES_PER_CLASS = 10
"""Of fewer, the classifiers learn too little to judge a label."""
MAX_MISTAKES = 1_000
"""So many are listed, the most confident ones."""
_DIGITS = 6
_NUM_SHOWN = 5
_PICTURES = 12


@dataclass(frozen=True, slots=True)
class SuspectLabel:
    """A row whose label may be wrong."""

    source: str
    sample_id: int
    split: str
    given_label: str
    suggested_label: str
    probability: float
    """Of the suggested class, by a classifier that has not seen the row."""
    score: float
    """How much larger that is than the probability of the given class."""
    is_likely: bool
    """Whether confident learning counts it among the wrong labels."""

    @property
    def words(self) -> str:
        # A limit gives others, too.
        how = "likely" if self.is_likely else "less likely"
        return f"{self.source} ({self.split}): {self.given_label}, {how} {self.suggested_label}"


@dataclass(frozen=True, slots=True)
class ConfidentMistake:
    """A row that the model was not trained on, and is sure of another class of."""

    source: str
    sample_id: int
    split: str
    given_label: str
    prediction: str
    probability: float

    @property
    def words(self) -> str:
        return f"{self.source} ({self.split}): {self.given_label}, predicted {self.prediction} {self.probability:.4f}"


@dataclass(frozen=True, slots=True)
class ClassFaults:
    """What is wrong in one class."""

    class_name: str
    num_images: int
    num_likely: int
    """Labels of this class that are likely wrong."""
    wrong_share: float | None
    """Estimated share of them among its labels; None for a class of too few images."""
    most_suggested: str
    """The class that most of them are likely of; empty for none."""
    num_tested: int
    """Images of this class that the model was not trained on."""
    num_mistaken: int
    """Those of them that it takes for another class."""
    most_predicted: str
    """The class that it takes most of these for; empty for none."""

    @property
    def words(self) -> str:
        labels = f"{self.num_likely:,} of {self.num_images:,} labels likely wrong"
        labels += f" (most of {self.most_suggested})" if self.most_suggested else ""
        mistakes = f"{self.num_mistaken:,} of {self.num_tested:,} mistaken"
        return f"{labels}, {mistakes}" + (f" (most for {self.most_predicted})" if self.most_predicted else "")


@dataclass(frozen=True, slots=True, repr=False)
class Mislabels(Result):
    """Labels that are likely wrong, and what the model gets wrong with confidence (`shardmill.mislabels`)."""

    predictions: DatasetPin
    dataset: DatasetPin | None
    """The predicted version; None for another source."""
    model: str
    num_images: int
    num_judged: int
    """Images whose labels were judged: those of classes with enough images."""
    accuracy: float
    """Share of these in which the classifiers that have not seen them agree with the label."""
    num_likely: int
    suspects: tuple[SuspectLabel, ...]
    """Likely wrong labels first, then the others, by falling score."""
    num_tested: int
    num_mistaken: int
    mistakes: tuple[ConfidentMistake, ...]
    """By falling probability."""
    classes: tuple[ClassFaults, ...]
    """Those with the most likely wrong labels and mistakes first."""

    def table(self) -> Rows:
        """The counts with their first examples, then the classes with the most faults."""
        listed: Rows = [
            ("labels", f"{self.num_likely:,} of {self.num_judged:,} are likely wrong"),
            *(("", each.words) for each in self.suspects[:_NUM_SHOWN]),
            ("mistakes", self._mistakes),
            *(("", each.words) for each in self.mistakes[:_NUM_SHOWN]),
            *((f"class {each.class_name}", each.words) for each in self.classes[:_NUM_SHOWN]),
        ]
        if unjudged := self.num_images - self.num_judged:
            listed.append(
                ("not judged", f"{counted(unjudged, 'image')} without a class, or of a class with few images")
            )
        return listed

    @property
    def _mistakes(self) -> str:
        if not self.num_tested:
            return (
                "unknown: any image may be one of the training; predict a dataset, and keep the version of the training"
            )
        return f"the model is wrong in {self.num_mistaken:,} of {self.num_tested:,} that it was not trained on"

    def show(self, num_images: int = _PICTURES) -> Image:
        """A contact sheet of the first suspects with the labels that they have, as a PIL image.

        Raises UsageError if there are none, or if a source was predicted, whose images are not stored.
        """
        from shardmill.loader.pictures import contact_sheet
        from shardmill.loader.samples import samples_by_id

        shown = self.suspects[:num_images]
        if self.dataset is None or not shown:
            why = "no label is suspect" if self.dataset is not None else "the predictions are those of a source"
            raise UsageError(f"no images to show: {why}", "expected suspect labels of a predicted dataset")
        version = open_pinned(self.dataset)
        samples = samples_by_id(version, shown)
        return contact_sheet([samples[each.sample_id] for each in shown], version.manifest.class_names)

    def _repr_html_(self) -> str:
        # `super()` without arguments finds no class with slots.
        tables = Result._repr_html_(self)
        try:
            return f"<div>{tables}{picture(self.show(), 'the first suspects, with the labels that they have')}</div>"
        except (ShardmillError, OSError) as error:
            return f"<div>{tables}<p>{text(error)}</p></div>"


def find_mislabels(rows: PredictedRows, limit: int = 0) -> Mislabels:
    """`limit`: number of suspect labels to give; 0: those that are likely wrong. Raises UsageError unless at least two
    classes have enough images.
    """
    judged, mistaken_N = _judge(rows), _mistaken(rows)
    order_M = np.lexsort((-judged.scores_M, ~judged.is_likely_M))
    num_likely = int(judged.is_likely_M.sum())
    return Mislabels(
        predictions=rows.pin,
        dataset=rows.made_by.predicted,
        model=str(rows.made_by),
        num_images=len(rows.sources),
        num_judged=len(judged.rows_M),
        accuracy=float((judged.scores_M < 0).mean()),
        num_likely=num_likely,
        suspects=tuple(_suspect(rows, judged, place) for place in order_M[: limit or num_likely].tolist()),
        num_tested=int(_is_tested(rows).sum()),
        num_mistaken=len(mistaken_N),
        mistakes=tuple(_mistake(rows, row) for row in mistaken_N[:MAX_MISTAKES].tolist()),
        classes=tuple(_classes(rows, judged, mistaken_N)),
    )


@dataclass(frozen=True)
class _Judged:
    """The rows of classes with enough images, and what was found of their labels."""

    rows_M: np.ndarray
    """Their numbers among all rows."""
    suggested_M: np.ndarray
    """The most probable class beside the given one."""
    probabilities_M: np.ndarray
    """Of that class."""
    scores_M: np.ndarray
    is_likely_M: np.ndarray
    wrong_share_of_class: dict[int, float]


def _judge(rows: PredictedRows) -> _Judged:
    from cleanlab.count import compute_confident_joint
    from cleanlab.filter import find_label_issues

    classes_K = _classes_with_enough_images(rows)
    rows_M = np.flatnonzero(np.isin(rows.labels_N, classes_K))
    given_M, each_M = np.searchsorted(classes_K, rows.labels_N[rows_M]), np.arange(len(rows_M))
    probabilities_MK = out_of_sample_probabilities(rows.embeddings_ND[rows_M], given_M, rows.hashes_N[rows_M])
    # One process: others would copy what is a few seconds' work.
    is_likely_M = find_label_issues(given_M, probabilities_MK, n_jobs=1)
    joint_KK: Any = compute_confident_joint(given_M, probabilities_MK, calibrate=True)
    of_given_M = probabilities_MK[each_M, given_M]
    probabilities_MK[each_M, given_M] = -1
    suggested_M = probabilities_MK.argmax(axis=1)
    of_suggested_M = probabilities_MK[each_M, suggested_M]
    right_K = joint_KK.diagonal() / joint_KK.sum(axis=1)
    return _Judged(
        rows_M=rows_M,
        suggested_M=classes_K[suggested_M],
        probabilities_M=of_suggested_M,
        scores_M=of_suggested_M - of_given_M,
        is_likely_M=is_likely_M,
        wrong_share_of_class=dict(zip(classes_K.tolist(), (1 - right_K).tolist(), strict=True)),
    )


def _classes_with_enough_images(rows: PredictedRows) -> np.ndarray:
    # Copies are in one fold, so that they count once.
    different = np.unique(np.stack([rows.labels_N.astype(np.uint64), rows.hashes_N])[:, rows.labels_N >= 0], axis=1)
    counts = np.bincount(different[0].astype(np.int64), minlength=len(rows.class_names))
    classes_K = np.flatnonzero(counts >= MIN_IMAGES_PER_CLASS)
    if len(classes_K) < 2:
        raise UsageError(
            f"{len(classes_K)} of {len(rows.class_names)} classes have {MIN_IMAGES_PER_CLASS} different images",
            "expected at least two: labels of smaller classes are not judged",
            "if images differ, the layer tells them not apart: predict with another --layer",
        )
    return classes_K


def _suspect(rows: PredictedRows, judged: _Judged, place: int) -> SuspectLabel:
    row = int(judged.rows_M[place])
    return SuspectLabel(
        source=rows.sources[row],
        sample_id=int(rows.sample_ids_N[row]),
        split=rows.splits[row],
        given_label=rows.class_names[rows.labels_N[row]],
        suggested_label=rows.class_names[judged.suggested_M[place]],
        probability=round(float(judged.probabilities_M[place]), _DIGITS),
        score=round(float(judged.scores_M[place]), _DIGITS),
        is_likely=bool(judged.is_likely_M[place]),
    )


def _is_tested(rows: PredictedRows) -> np.ndarray:
    return ~rows.is_seen_N & (rows.labels_N >= 0)


def _mistaken(rows: PredictedRows) -> np.ndarray:
    """The rows in which a tested model is wrong, the most confident mistake first."""
    names = rows.class_names
    given = np.array([names[label] if label >= 0 else "" for label in rows.labels_N.tolist()], object)
    mistaken = np.flatnonzero(_is_tested(rows) & (given != np.array(rows.predictions, object)))
    return mistaken[np.argsort(-rows.probabilities_N[mistaken], kind="stable")]


def _mistake(rows: PredictedRows, row: int) -> ConfidentMistake:
    return ConfidentMistake(
        source=rows.sources[row],
        sample_id=int(rows.sample_ids_N[row]),
        split=rows.splits[row],
        given_label=rows.class_names[rows.labels_N[row]],
        prediction=rows.predictions[row],
        probability=round(float(rows.probabilities_N[row]), _DIGITS),
    )


def _classes(rows: PredictedRows, judged: _Judged, mistaken_N: np.ndarray) -> list[ClassFaults]:
    likely = judged.rows_M[judged.is_likely_M]
    suggested = _by_class(rows, likely, (rows.class_names[each] for each in judged.suggested_M[judged.is_likely_M]))
    predicted = _by_class(rows, mistaken_N, (rows.predictions[row] for row in mistaken_N.tolist()))
    counts, tested = (
        np.bincount(rows.labels_N[which_N], minlength=len(rows.class_names))
        for which_N in (rows.labels_N >= 0, _is_tested(rows))
    )
    found = [
        ClassFaults(
            class_name=name,
            num_images=int(counts[label]),
            num_likely=suggested[label].total(),
            wrong_share=judged.wrong_share_of_class.get(label),
            most_suggested=_most_frequent(suggested[label]),
            num_tested=int(tested[label]),
            num_mistaken=predicted[label].total(),
            most_predicted=_most_frequent(predicted[label]),
        )
        for label, name in enumerate(rows.class_names)
    ]
    return sorted(found, key=lambda each: -(each.num_likely + each.num_mistaken))


def _by_class(rows: PredictedRows, numbers: np.ndarray, answers: Iterable[str]) -> list[Counter[str]]:
    """For each class its rows' answers, counted."""
    found: list[Counter[str]] = [Counter() for _ in rows.class_names]
    for row, answer in zip(numbers.tolist(), answers, strict=True):
        found[rows.labels_N[row]][answer] += 1
    return found


def _most_frequent(answers: Counter[str]) -> str:
    return answers.most_common(1)[0][0] if answers else ""
