"""The readers of the train split; a new one is a module and an entry here, without a change to the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.registry import Entry, ExtensionPoint, Registry, load_object
from train.strategies.options import silos_of

if TYPE_CHECKING:
    from train.api import TrainReader
    from train.config import TrainConfig

READERS: Registry[TrainReader] = Registry(
    "train.reader",
    {
        "shardmill": Entry("train.readers.planned:PLANNED", "every sample exactly once per epoch; resumes at any step"),
        "petastorm": Entry(
            "train.readers.petastorm:PETASTORM",
            "Petastorm's make_batch_reader over the Parquet files of a dataset version; epochs are not exact",
            extra="petastorm",
            packages=("petastorm",),
        ),
    },
    options_prefix="reader_",
    point=ExtensionPoint("what reads the train split", "train.api:TrainReader"),
)


def reader_of(config: TrainConfig) -> TrainReader:
    """Return the reader that `train.reader` names; silos have their own."""
    return load_object("train.readers.silos:SILOS") if silos_of(config) else READERS[config.reader]
