"""Finds image, class and key among the features of a tf.Example record, and reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from etl.sources.class_texts import joined
from etl.sources.class_values import class_of, single_text, text_of
from etl.sources.columns import choose_column
from etl.sources.unused_labels import named_signs
from etl.sources.value_text import EXACT_FLOATS, whole_text
from shardmill.errors import UsageError
from shardmill.formats.tf_example import BYTES_LIST, FeatureList
from shardmill.printable import printable
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig

# In the order of preference.
IMAGE_FEATURES = ("image/encoded", "image", "image_raw")
LABEL_FEATURES = ("image/class/text", "image/class/label", "image/class/synset", "label", "class")
_TEXT_FEATURE, _NUMBER_FEATURES = "image/class/text", ("image/class/label", "image/class/synset")

Features = Mapping[str, FeatureList]


def image_of(features: Features, name: str) -> tuple[bytes | None, str]:
    """The encoded image of a record, or its mask; or None and what is wrong with it."""
    feature = features.get(name) or FeatureList(BYTES_LIST, ())
    if feature.kind != BYTES_LIST or not feature.values:
        return None, f"no feature {name} of bytes"
    if len(feature.values) > 1:
        return None, f"{name} has {len(feature.values)} values, expected one encoded image"
    return bytes(feature.values[0]), ""


@dataclass(frozen=True, slots=True)
class FeatureNames:
    """The records' own names; None for what the first of them lacks."""

    image: str
    label: str | None
    text: str | None
    """Name of the class, if `label` is its number."""
    key: str | None
    has_classes: bool
    """Whether classes are asked for."""
    signs: tuple[str, ...] = ()
    """Features that seem to be labels, if none is taken."""

    @property
    def wanted(self) -> frozenset[str]:
        """The features that are read of each record."""
        unexpected = LABEL_FEATURES if self._expects_none else ()
        return frozenset(name for name in (self.image, self.label, self.text, self.key, *unexpected) if name)

    @property
    def _expects_none(self) -> bool:
        return self.has_classes and self.label is None

    def entry(self, image: SourceImage, features: Features, split: str | None) -> SourceImage | Rejection:
        """The record as a listed image, or why it is refused. Raises UsageError for a label that came unexpected."""
        data, problem = image_of(features, self.image)
        if data is None:
            return image.rejected(RejectReason.BAD_ROW, problem, "list")
        image = replace(image, size_bytes=len(data), split=split)
        if self.key is not None:
            key, problem = _key_of(features, self.key)
            if key is None:
                return image.rejected(RejectReason.BAD_ROW, problem, "list")
            image = replace(image, key=whole_text(key))
        if self._expects_none:
            self._refuse_label(image, features)
        if self.label is None:
            return image
        label, problem = class_of(_values(features, self.label), f"feature {self.label}")
        if self.text is not None:
            text = _only_text(features, self.text)
            label = joined(label or "", text) if label or text else None
        return image.rejected(RejectReason.BAD_LABEL, problem, "list") if label is None else replace(image, label=label)

    def _refuse_label(self, image: SourceImage, features: Features) -> None:
        label = next((name for name in LABEL_FEATURES if _values(features, name)), None)
        if label is not None:
            raise UsageError(
                f"{printable(image.key)} has the feature {label}, but the first record has no label",
                "expected a label in each record, or in none",
                f"set source.label_field={label}: records without it are then rejected",
            )


def choose_names(config: SourceConfig, features: Features, file: str) -> FeatureNames:
    """The names by the first record's features. Raises UsageError if it has no image, or not what the config names."""
    names = [name for name in features if features[name].values]
    image = choose_column(names, config.image_field, IMAGE_FEATURES, "image_field")
    if image is None:
        raise UsageError(
            f"the first record of {printable(file)} has the features {', '.join(map(printable, names[:20]))}",
            f"expected an encoded image, called {' or '.join(IMAGE_FEATURES)}",
            "name it with source.image_field",
        )
    has_classes = config.label_kind == "class"
    label = choose_column(names, config.label_field, LABEL_FEATURES, "label_field") if has_classes else None
    number = next((name for name in _NUMBER_FEATURES if name in names), None)
    # Two classes may have one text, unless the config says that texts are what is meant.
    text = label if label == _TEXT_FEATURE and number and not config.label_field else None
    key = choose_column(names, config.key_field, (), "key_field")
    signs = tuple(named_signs(names, file)) if has_classes and label is None else ()
    return FeatureNames(image, number if text else label, text, key, has_classes, signs)


def _key_of(features: Features, name: str) -> tuple[str | None, str]:
    values = _values(features, name)
    if any(isinstance(value, float) and abs(value) >= EXACT_FLOATS[32] for value in values):
        return (
            None,
            f"feature {name} is a float of 32 bits with more digits than that keeps; expected an integer or text",
        )
    return single_text(values, f"feature {name}")


def _values(features: Features, name: str) -> list:
    return list(features[name].values) if name in features else []


def _only_text(features: Features, name: str) -> str:
    values = _values(features, name)
    found = text_of(bytes(values[0])) if len(values) == 1 and not isinstance(values[0], int | float) else None
    return (found or "").replace("\0", "")
