"""The decision table of docs/promotion.md, and models that are sure of themselves, also where they are wrong."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from etl.config import SourceConfig, SplitFractions
from shardmill.checksummed import with_checksum
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.errors import GateNotPassed, IntegrityError, UsageError
from shardmill.loader.reader import read_split
from shardmill.stores import open_store
from tests.etl.incremental import build_from
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.train.exports import put_export
from tests.train.learners import LINEAR
from tests.train.training import Recorder, train_here
from train.config import TrainConfig
from train.contracts.values import Evaluation, MetricsOfClass
from train.metrics.evaluate import scores_of
from train.published.announce import announce
from train.published.evaluation import by_name, evaluate_export
from train.published.export import check_metrics, export_training
from train.published.exported import Export, load_exported, read_history
from train.published.gate import FEW_SAMPLES, _metric_among, decide, promote_export
from train.published.promote import Comparison, Incomparable, Promotion, choose_export, roll_back
from train.settings import GateConfig

TABLE = Path(__file__).resolve().parent.parent.parent / "docs" / "promotion.md"
SCENARIOS: dict[str, Callable[[Models], None]] = {}


class Models:
    """A models' root with exports to promote, and datasets to make them of."""

    def __init__(self, folder: Path, datasets: Path) -> None:
        self.folder, self.uri, self.datasets = folder, str(folder), datasets

    def export(self, dataset: str = "three", **how: object) -> Export:
        return put_export(self.uri, str(self.datasets / dataset / "dataset"), **how)

    def promote(self, candidate: Export, *, floor: float = 0.5, **flags: bool) -> Promotion:
        return promote_export(self.uri, candidate, GateConfig(min_accuracy=floor), "run", **flags)

    def kept(self, candidate: Export, **how: object) -> str:
        """The reason for which the candidate is kept out; `--require` makes it an error."""
        before = read_history(open_store(self.uri)).next_number
        found = self.promote(candidate, **how)
        with pytest.raises(GateNotPassed):
            self.promote(candidate, require=True, **how)
        assert found.gate.decision == "kept" and read_history(open_store(self.uri)).next_number == before
        return found.gate.reason

    def promoted(self, candidate: Export, **how: object) -> str:
        """The reason for which the candidate is let in; the same stands in the pointer."""
        found = self.promote(candidate, require=True, **how)
        assert (found.gate.decision, found.current) == ("promoted", candidate.number)
        pointer = read_history(open_store(self.uri)).current
        assert (pointer.export, pointer.decision, pointer.reason) == (candidate.number, "promoted", found.gate.reason)
        return found.gate.reason

    def damage(self, path: str) -> None:
        data = bytearray((self.folder / path).read_bytes())
        data[len(data) // 2] ^= 1
        (self.folder / path).write_bytes(data)


def row(case: str) -> Callable[[Callable[[Models], None]], Callable[[Models], None]]:
    def keep(scenario: Callable[[Models], None]) -> Callable[[Models], None]:
        SCENARIOS[case] = scenario
        return scenario

    return keep


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> Path:
    """Datasets of three classes, of five (the same three among them), of three others, and of larger images."""
    folder = tmp_path_factory.mktemp("datasets")
    fractions = {"train": 0.5, "test": 0.5, "validation": 0.0}
    make_dataset(folder / "three", num_images=90, split_fractions=fractions)
    make_dataset(folder / "five", num_images=150, num_classes=5, split_fractions=fractions)
    make_dataset(folder / "large", num_images=90, image_size=24, split_fractions=fractions)
    make_dataset(folder / "few", num_images=60, split_fractions={"train": 0.8, "test": 0.2, "validation": 0.0})
    images = folder / "others" / "images"
    write_images(images, num_images=90)
    for each in list(images.iterdir()):
        each.rename(images / f"other_{each.name}")
    from etl.config import EtlConfig

    build_here(str(images), str(folder / "others" / "dataset"),
               EtlConfig(image_size=16, encoding="png", unit_min_images=40, split_fractions=fractions))  # fmt: skip
    return folder


@row("candidate is damaged")
def candidate_damaged(models: Models) -> None:
    candidate = models.export()
    models.damage(candidate.record.files[-1].path)
    with pytest.raises(IntegrityError, match="was altered"):
        models.promote(candidate)
    assert read_history(open_store(models.uri)).current is None


@row("current model's record has a different layout (written by another version of shardmill)")
def other_layout(models: Models) -> None:
    candidate = models.export()
    written_by_another = b'{"attempt": "a", "record": {"export": 1, "colour": "blue"}}'
    open_store(models.uri).put("current/00000001.json", with_checksum(written_by_another))
    with pytest.raises(UsageError, match=f"a different layout; .*promote {models.uri}@N"):
        models.promote(candidate)
    assert choose_export(models.uri, candidate.number, "run").current == candidate.number


@row("candidate is the current one")
def already_current(models: Models) -> None:
    candidate = models.export(is_good=False)
    models.promoted(candidate, floor=0.0)
    assert models.promote(candidate, floor=0.0, require=True).gate.decision == "already_current"
    assert models.promote(candidate, floor=0.9).gate.decision == "already_current"
    with pytest.raises(GateNotPassed, match=r"is the current one, but accuracy .* is below gate.min_accuracy = 0.9"):
        models.promote(candidate, floor=0.9, require=True)


@row("candidate was rolled back")
def rolled_back(models: Models) -> None:
    first, second = models.export(), models.export()
    models.promoted(first)
    models.promoted(second)
    assert roll_back(models.uri, "run").current == first.number
    assert f"promote {models.uri}@{second.number}" in models.kept(second)
    assert "rolled back" in models.kept(second, replace_current=True)
    # How a rollback is undone; from then on it is an export like any other.
    assert choose_export(models.uri, second.number, "run").gate.decision == "chosen"
    assert models.promote(second).gate.decision == "already_current"
    models.promoted(first)


@row("validation was no better than guessing ([when](training/labels.md#models-that-only-guess))")
def only_guesses(models: Models) -> None:
    candidate = models.export(caution="the validation accuracy is no better than guessing")
    assert f"no better than guessing; `shardmill promote {models.uri}@{candidate.number}`" in models.kept(candidate)
    models.kept(candidate, replace_current=True)
    assert choose_export(models.uri, candidate.number, "run").current == candidate.number


@row("no test or validation split")
def unjudged(models: Models) -> None:
    assert "no test or validation split" in models.kept(models.export(split=None), replace_current=True)


@row("below the floor (`gate.min_accuracy`)")
def below_floor(models: Models) -> None:
    assert "is below gate.min_accuracy = 0.5" in models.kept(models.export(is_good=False), replace_current=True)


@row("no current model")
def first_model(models: Models) -> None:
    assert "there was no current model" in models.promoted(models.export())


@row("current model's pointer is damaged")
def pointer_damaged(models: Models) -> None:
    first, second, third = models.export(), models.export(), models.export()
    models.promoted(first)
    models.promoted(second)
    roll_back(models.uri, "run")
    models.damage("current/00000003.json")
    # Nobody knows which of the two it named, nor whether a person has taken one of them out.
    assert "was promoted before" in models.kept(second)
    assert "it is unknown which export is current" in models.promoted(third)
    assert "was promoted before" in models.kept(second)
    choose_export(models.uri, second.number, "run")
    models.promoted(third)


@row("current model is damaged or missing")
def current_damaged(models: Models) -> None:
    for path in ("file", "record", "record is missing"):
        current, candidate = models.export(), models.export()
        choose_export(models.uri, current.number, "run")
        record = f"exports/{current.number:08d}.json"
        saved_model = next(file.path for file in current.record.files if file.path.endswith("saved_model.pb"))
        if path == "record is missing":
            (models.folder / record).unlink()
        else:
            models.damage(saved_model if path == "file" else record)
        reason = models.promoted(candidate)
        assert f"current export {current.number}" in reason and "so nothing was compared" in reason
        # And never past the floor.
        assert "below" in models.kept(models.export(is_good=False))


@row("image sizes differ")
def other_size(models: Models) -> None:
    models.promoted(models.export())
    candidate = models.export("large")
    reason = models.kept(candidate)
    assert "takes images of (16, 16, 3), not (24, 24, 3)" in reason and "--replace-current" in reason
    assert "replaced by --replace-current" in models.promoted(candidate, replace_current=True)


@row("no class in common")
def disjoint(models: Models) -> None:
    models.promoted(models.export())
    candidate = models.export("others")
    reason = models.kept(candidate)
    assert "has none of the classes" in reason and "--replace-current" in reason
    assert "replaced by --replace-current" in models.promoted(candidate, replace_current=True)


@row("some classes in common")
def overlapping(models: Models) -> None:
    models.promoted(models.export())
    # It knows two more classes, and nothing about the three: the flag is no way around a comparison that is possible.
    worse = models.export("five", is_good=False)
    reason = models.kept(worse, floor=0.0, replace_current=True)
    assert re.search(r"test samples of the 3 classes that both know \(of 5\) falls behind", reason), reason
    better = models.export("five")
    assert "3 classes that both know (of 5) against the current model's" in models.promoted(better)
    # And back: the candidate knows fewer.
    assert "3 classes that both know (of 3)" in models.promoted(models.export())


@row("worse than the current model by more than `gate.max_regression`")
def regression(models: Models) -> None:
    models.promoted(models.export())
    worse = models.export(is_good=False)
    assert "falls behind the current model's" in models.kept(worse, floor=0.0, replace_current=True)


@row("otherwise")
def as_good(models: Models) -> None:
    models.promoted(models.export())
    assert "the current model has" in models.promoted(models.export())


def test_every_row_of_the_table_has_its_test():
    # The first table of the page: that of decisions.
    _, _, table = TABLE.read_text().partition("\n| case |")
    rows = [line.split("|")[1].strip() for line in table.partition("\n\n")[0].splitlines() if line.startswith("| ")]
    assert rows == list(SCENARIOS)


@pytest.mark.parametrize("case", SCENARIOS)
def test_the_decision_table(case, tmp_path, datasets):
    SCENARIOS[case](Models(tmp_path, datasets))


def test_a_decision_on_a_handful_of_samples_says_so(tmp_path, datasets):
    models = Models(tmp_path, datasets)
    reason = models.promoted(models.export("few"))
    assert re.search("caution: \\d+ samples are too few to compare models", reason)
    assert "caution" not in models.promoted(models.export())


def evaluation(accuracy: float) -> Evaluation:
    return Evaluation("test", 200, 0.5, accuracy, None, ())


@pytest.mark.parametrize(
    ("candidate", "current", "gate", "decision", "said"),
    [
        (0.9, None, {}, "promoted", "accuracy 0.9000 on 200 test samples"),
        (0.9, None, {"min_accuracy": 0.95}, "kept", "is below gate.min_accuracy = 0.95"),
        (0.95, None, {"min_accuracy": 0.95}, "promoted", "there was no current model"),
        (0.9, None, {"min_accuracy": 0.8, "metric_limit": 0.8}, "promoted", "reaches gate.min_accuracy = 0.8"),
        (0.9, None, {"min_accuracy": 0.8, "metric_limit": 0.95}, "kept", "is below gate.metric_limit = 0.95"),
        (0.9, 0.9, {}, "promoted", "the current model has 0.9000"),
        (0.895, 0.9, {"max_regression": 0.01}, "promoted", "0.9000"),
        (0.88, 0.9, {"max_regression": 0.01}, "kept", "falls behind the current model's 0.9000"),
        (0.88, 0.9, {"max_regression": 0.05}, "promoted", ""),
        (0.99, 0.9, {"min_accuracy": 0.995}, "kept", "below"),
    ],
)
def test_the_gates_arithmetic(candidate, current, gate, decision, said):
    against = Comparison(candidate, current, 200) if current is not None else None
    found = decide(evaluation(candidate), against, GateConfig(**gate))
    assert (found.decision, found.candidate_value) == (decision, candidate)
    assert found.is_passed == (decision == "promoted")
    assert said in found.reason


@pytest.mark.parametrize(("accuracy", "is_below"), [(0.5, True), (0.6, False), (0.9, False)])
def test_a_model_that_is_worse_than_the_most_frequent_class_is_promoted_with_a_warning(tmp_path, accuracy, is_below):
    classes = (MetricsOfClass("cat", 80, 0.5, 0.5), MetricsOfClass("dog", 120, 0.5, 0.5))
    found = decide(replace(evaluation(accuracy), per_class=classes), None, GateConfig())
    said = "accuracy 0.5000 on 200 test samples is below 0.6000, the share of the most frequent class, 'dog'"
    assert found.is_passed and found.caution == (said if is_below else "") and found.caution in found.reason
    announce(Promotion(str(tmp_path), found, None, None), GateConfig(), recorder := Recorder())
    assert recorder.named("promote.warning") == ([{"warning": said}] if is_below else [])
    # Nothing is said of a model that stays where it is.
    kept = decide(replace(evaluation(accuracy), per_class=classes), None, GateConfig(min_accuracy=0.95))
    announce(Promotion(str(tmp_path), kept, None, None), GateConfig(), recorder := Recorder())
    assert recorder.events == []


def test_few_samples_are_those_that_were_compared():
    against = Comparison(0.9, 0.9, FEW_SAMPLES - 1, " of the 2 classes that both know (of 9)")
    assert "caution: 29 samples" in decide(evaluation(0.9), against, GateConfig()).reason
    assert "caution" not in decide(evaluation(0.9), replace(against, num_samples=FEW_SAMPLES), GateConfig()).reason
    assert "caution" not in decide(evaluation(0.9), Incomparable("too large"), GateConfig()).reason


@pytest.mark.parametrize(
    ("is_damaged", "flags", "decision", "said"),
    [
        (False, {}, "kept", "too large; `shardmill promote MODELS --replace-current` promotes without a comparison"),
        (False, {"replace_current": False}, "kept", "too large; "),
        (False, {"replace_current": True}, "promoted", "replaced by --replace-current, because too large"),
        (True, {}, "promoted", "too large, so nothing was compared"),
    ],
)
def test_what_cannot_be_compared_stays_unless_it_is_damaged_or_given_up(is_damaged, flags, decision, said):
    found = decide(evaluation(0.9), Incomparable("too large", is_damaged=is_damaged), GateConfig(), **flags)
    assert (found.decision, found.is_passed) == (decision, decision == "promoted") and said in found.reason


NUM_IMAGES = 160
SURE = 30.0
"""A float32 sigmoid is exactly 1 from a logit of 16.7 on."""


def _image(brightness: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), brightness, np.uint8)).save(out, "PNG")
    return out.getvalue()


def _labels(kind: str, brightness_N: np.ndarray) -> list[Any]:
    """What can be learned from the brightness, but for every seventh image, whose label says the contrary."""
    is_bright_N = (brightness_N > 127) ^ (np.arange(len(brightness_N)) % 7 == 0)
    match kind:
        case "class":
            return [f"class {int(each) + (number % 3 == 0)}" for number, each in enumerate(is_bright_N)]
        case "binary":
            return ["bright" if each else "dark" for each in is_bright_N]
        case "multi_label":
            return [["bright", "image"] if each else ["image"] for each in is_bright_N]
        case _:
            return (is_bright_N * 1e6).tolist()


@pytest.fixture(scope="module")
def bright_datasets(tmp_path_factory) -> dict[str, Dataset]:
    brightness_N = np.random.default_rng(0).integers(0, 256, NUM_IMAGES)
    found = {}
    for kind in ("class", "binary", "multi_label", "float"):
        folder = tmp_path_factory.mktemp(kind)
        images = [_image(each) for each in brightness_N]
        pq.write_table(pa.table({"image": images, "labels": _labels(kind, brightness_N)}), folder / "a.parquet")
        label_kind = "class" if kind == "binary" else kind
        source = SourceConfig(uri=str(folder / "a.parquet"), kind="parquet", label_kind=label_kind)
        fractions = SplitFractions(train=0.5, validation=0.2, test=0.3)
        build_from(source, folder / "dataset", image_size=8, split_fractions=fractions)
        found[kind] = open_dataset(str(folder / "dataset"))
    return found


@pytest.mark.parametrize("kind", ["class", "binary", "multi_label", "float"])
@pytest.mark.parametrize("backend", LINEAR)
def test_it_is_exported_with_the_loss_that_training_recorded(bright_datasets, kind, backend, tmp_path):
    dataset, settings = bright_datasets[kind], {"model": LINEAR[backend], "epochs": 4, "schedule": "constant"}
    settings |= {"learning_rate": 100.0 if kind == "float" else 3.0, "augment": {"random_crop_padding": 0}}
    result = train_here(dataset.pin.uri, tmp_path, **settings)
    assert result.evaluation.loss > SURE, "the model is not sure enough of what it mistakes"

    config = TrainConfig(**settings, global_batch_size=32)
    export = export_training(str(tmp_path), config, result, "run").export
    assert export.record.evaluation.loss == pytest.approx(result.evaluation.loss, rel=1e-4)
    assert export.record.evaluation.metric_value == pytest.approx(result.evaluation.metric_value, rel=1e-4)

    # As `evaluate` on another version and the gate's comparison measure it.
    with read_split(dataset, "test") as batches:
        measured = evaluate_export(load_exported(str(tmp_path), export.number), dataset, "test", batches)
    assert measured.loss == pytest.approx(result.evaluation.loss, rel=1e-4)
    assert measured.per_class == result.evaluation.per_class


@pytest.mark.parametrize("kind", ["class", "multi_label"])
@pytest.mark.parametrize("are_logits", [True, False])
def test_a_class_that_an_export_does_not_know_is_never_its_answer(kind, are_logits):
    outputs_NK = np.array([[-500.0, 300.0, -900.0]], np.float32) if are_logits else np.array([[0.0, 1.0, 0.0]])
    scores = by_name(lambda _images: scores_of(kind, outputs_NK, are_logits), "abc", ["new", "c", "b", "a"])
    [found] = scores(np.empty(0))
    assert found.argmax() == 2 and found[0] < found[1:].min() and np.isfinite(found).all()
    # Without the best one: of two that it is sure not to see, it still takes none that it does not know.
    among = by_name(lambda _images: scores_of(kind, outputs_NK, are_logits), "abc", ["new", "c", "a"], ["a", "c"])
    assert among(np.empty(0)).argmax() != 0


def test_a_class_without_a_sample_counts_in_no_mean():
    metrics = tuple(MetricsOfClass(name, 9, 0.0, 0.0, mean) for name, mean in (("a", 0.5), ("b", None), ("c", 1.0)))
    several = Evaluation("test", 9, 0.0, None, None, metrics, label_kind="multi_label")
    assert _metric_among(["a", "b", "c"], several) == 0.75 and _metric_among(["a", "b"], several) == 0.5


def test_numbers_without_error_may_differ_by_rounding_alone():
    exact = Evaluation("test", 9, 0.0, None, None, (), label_kind="float", mean_absolute_error=0.0)
    rounded = replace(exact, loss=4.0, mean_absolute_error=1.5)
    # Answers around a million, in float32.
    check_metrics(rounded, exact, "off", rounding=10.0)
    with pytest.raises(IntegrityError, match=r"loss 4\.0000 and mean absolute error 1\.5000"):
        check_metrics(rounded, exact, "off", rounding=1.0)


def test_a_sigmoid_that_rounds_to_1_costs_no_more_than_the_number_before_it():
    """Kernels of two builds differ in the last bit of a float32, and 1 less nothing has no logarithm."""
    one, before_one, small = np.float32(1), np.nextafter(np.float32(1), np.float32(0)), np.float32(1e-30)
    of_one, of_before, of_small = scores_of("multi_label", np.array([[one, before_one, small]]), False)[0]
    assert of_one == of_before == pytest.approx(24 * np.log(2), abs=1e-6)
    assert of_small == pytest.approx(-30 * np.log(10), rel=1e-6), "a float32 near 0 is exact"
