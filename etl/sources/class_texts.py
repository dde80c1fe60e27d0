"""Classes that records give as a number and a text: the number identifies the class, and the text names it.

ImageNet has two classes whose text is "crane", a bird and a machine.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from shardmill.printable import printable

# More of one number say no more than two do.
_MAX_TEXTS = 2
_NUM_EXAMPLES = 3
_LABEL = LISTED_SCHEMA.get_field_index("label")


def joined(number: str, text: str) -> str:
    """Both as one label, until all of them are known; either may be empty."""
    return f"{number}\0{text}"


class ClassTexts:
    """Collects the class texts of all records; `named` then turns the labels into `joined` class names."""

    def __init__(self) -> None:
        self._texts: dict[str, set[str]] = {}
        self._names: dict[str, str] = {}

    def look(self, images: pa.Table) -> None:
        """Take in the labels of some images."""
        for label in pc.unique(images.column("label")).drop_null().to_pylist():
            number, _, text = label.partition("\0")
            texts = self._texts.setdefault(number, set()) if number else set()
            if text and len(texts) < _MAX_TEXTS:
                texts.add(text)

    def settle(self) -> None:
        """All labels are known: choose each class's name."""
        called = {number: next(iter(texts)) if len(texts) == 1 else number for number, texts in self._texts.items()}
        times = Counter(called.values())
        self._names = {number: name if times[name] == 1 else f"{name} ({number})" for number, name in called.items()}
        if len(set(self._names.values())) < len(self._names):
            self._names = {number: number for number in called}

    def named(self, images: pa.Table) -> ListingBatch:
        """The images with their final labels."""
        encoded = images.column("label").combine_chunks().dictionary_encode()
        names = pa.array(
            [self._name_of(*label.split("\0", 1)) for label in encoded.dictionary.to_pylist()], pa.string()
        )
        return ListingBatch(images.set_column(_LABEL, LISTED_SCHEMA.field(_LABEL), names.take(encoded.indices)))

    def _name_of(self, number: str, text: str) -> str:
        return text if not number or self._is_one_number else self._names[number]

    @property
    def _is_one_number(self) -> bool:
        """Whether the numbers tell no classes apart, and the texts do."""
        return len(self._texts) == 1 and len(next(iter(self._texts.values()))) > 1

    def warnings(self, number_feature: str, text_feature: str) -> Iterator[str]:
        """Warnings about numbers and texts that do not match."""
        if self._is_one_number:
            yield f"every {number_feature} is {next(iter(self._texts))}, so the classes are those of {text_feature}"
            return
        renamed = [name for number, name in self._names.items() if name not in (number, *self._texts[number])]
        if renamed:
            yield (
                f"several classes have one {text_feature}, and their {number_feature} distinguishes them: "
                f"{_some(sorted(renamed))}"
            )
        varied = [f"{number} ({', '.join(sorted(texts))})" for number, texts in self._texts.items() if len(texts) > 1]
        if varied:
            yield (
                f"{len(varied)} of the classes have images with different {text_feature}, and are named by their "
                f"{number_feature}: {_some(varied)}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_EXAMPLES} more" if len(names) > _NUM_EXAMPLES else ""
    return ", ".join(map(printable, names[:_NUM_EXAMPLES])) + more
