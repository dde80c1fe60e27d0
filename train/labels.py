"""Derives from the kind of a dataset's labels the number of model outputs and the metric that compares models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.augment.mixing import check_mixing
from shardmill.errors import UsageError
from shardmill.typed_columns import vector_size
from shardmill.values import LabelKind
from train.contracts.values import METRICS

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest
    from shardmill.formats.rows import RowSchema
    from train.config import TrainConfig
    from train.settings import GateConfig

LOSSES: dict[LabelKind, str] = {
    "class": "softmax",
    "multi_label": "sigmoid",
    "float": "squared_error",
    "float_vector": "squared_error",
}
"""The loss that `train.loss = "auto"` chooses, unless a user's model was compiled with its own."""


@dataclass(frozen=True, slots=True)
class LabelSpec:
    """The labels of a dataset that a model learns."""

    kind: LabelKind
    class_names: tuple[str, ...] = ()
    """Class names for one or several classes per image; empty for numbers."""
    vector_size: int = 0
    """The length of vectors; 0 for any other kind."""

    @classmethod
    def of(cls, manifest: Manifest) -> LabelSpec:
        return cls.of_schema(manifest.row_schema)

    @classmethod
    def of_schema(cls, schema: RowSchema) -> LabelSpec:
        return cls(schema.label_kind, schema.class_names, vector_size(schema.label_type))

    @property
    def are_numbers(self) -> bool:
        return self.kind in ("float", "float_vector")

    @property
    def num_outputs(self) -> int:
        """K: what a factory gets as `num_classes`."""
        return max(1, self.vector_size) if self.are_numbers else len(self.class_names)

    def __str__(self) -> str:
        if self.are_numbers:
            return f"labels of {self.num_outputs} number(s)"
        several = ", of which an image may have several" if self.kind == "multi_label" else ""
        return f"{self.num_outputs} class{'es' * (self.num_outputs != 1)}{several}"


def check_labels(config: TrainConfig, labels: LabelSpec) -> None:
    """Raises UsageError if there is nothing to learn, or section `train` asks for what these labels do not have."""
    if labels.kind == "class" and labels.num_outputs < 2:
        raise UsageError(
            f"the dataset has {labels.num_outputs} class(es)",
            "expected at least 2 to train a classifier",
            "add images of another class",
        )
    if config.loss not in ("auto", LOSSES[labels.kind]):
        raise UsageError(
            f"train.loss = {config.loss!r}, but the dataset has {labels}",
            f"expected {LOSSES[labels.kind]!r}",
            'set train.loss = "auto"',
        )
    check_mixing(config.augment, labels.kind, len(labels.class_names))
    if labels.are_numbers and config.label_smoothing:
        raise UsageError(
            f"train.label_smoothing = {config.label_smoothing}, but the dataset has {labels}",
            "expected 0: only classes can be smoothed",
            "set train.label_smoothing = 0",
        )
    if labels.are_numbers and config.model_outputs != "auto":
        raise UsageError(
            f"train.model_outputs = {config.model_outputs!r}, but the dataset has {labels}",
            "expected auto: the outputs are the numbers themselves",
            'set train.model_outputs = "auto"',
        )


def check_gate(gate: GateConfig, kind: LabelKind) -> None:
    """Raises UsageError if section `gate` asks for an accuracy, and models are compared by something else."""
    if gate.min_accuracy and kind != "class":
        raise UsageError(
            f"gate.min_accuracy = {gate.min_accuracy:g}, but the labels are of kind {kind!r}",
            f"expected a limit for their {METRICS[kind].words}",
            "set gate.min_accuracy = 0 and gate.metric_limit",
        )
