"""Reads the boxes of a tf.Example record: four features of shares of width and height, as TensorFlow's tools do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etl.sources.boxes import SIZE_FIELDS
from etl.sources.class_values import text_of
from shardmill.formats.tf_example import FeatureList
from shardmill.typed_columns import BOX_LABELS, BOXES

if TYPE_CHECKING:
    from etl.config import BoxesConfig

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_SIZE_FEATURES = ("image/width", "image/height")
# As much as TensorFlow's own tools allow for rounding, on either side.
_LEAST_SHARE, _LARGEST_SHARE = -0.1, 1.1


def boxes_of_features(features: Mapping[str, FeatureList], config: BoxesConfig) -> dict[str, Any]:
    """A record's boxes in pixels, by the names of `BoxColumns.of_record`; empty if it has no box.

    Raises ValueError that says what is wrong with them.
    """
    shares = [_values(features, f"{config.field}/{side}") for side in _SIDES]
    counts = [len(each) for each in shares]
    if len(set(counts)) > 1:
        raise ValueError(f"its features {config.field}/{', /'.join(_SIDES)} have {', '.join(map(str, counts))} values")
    sizes = [_values(features, name) for name in _SIZE_FEATURES]
    width, height = (size[0] if len(size) == 1 and isinstance(size[0], int) else 0 for size in sizes)
    if counts[0] and not (width > 0 and height > 0):
        raise ValueError(f"no {' and '.join(_SIZE_FEATURES)}, which boxes in shares of them need")
    odd = next((share for each in shares for share in each if not _is_share(share)), None)
    if odd is not None:
        raise ValueError(f"a box has {odd!r}, expected shares of width and height, from 0 to 1")
    record: dict[str, Any] = {
        BOXES: [[x0 * width, y0 * height, x1 * width, y1 * height] for x0, y0, x1, y1 in zip(*shares, strict=True)]
    }
    if config.labels_field:
        record[BOX_LABELS] = [_label_of(value) for value in _values(features, config.labels_field)]
    return record | (dict(zip(SIZE_FIELDS, (width, height), strict=True)) if width and height else {})


def _values(features: Mapping[str, FeatureList], name: str) -> Sequence[Any]:
    """Writers leave a feature without values out."""
    return features[name].values if name in features else ()


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and _LEAST_SHARE <= value <= _LARGEST_SHARE


def _label_of(value: Any) -> Any:
    """Of bytes the text; None if it is none."""
    return value if isinstance(value, int | float) else text_of(bytes(value))
