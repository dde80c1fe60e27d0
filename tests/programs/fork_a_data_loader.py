"""Gives a DataLoader with two forked workers a reader of the dataset argv[1], begun here or in the worker."""

import sys
from collections.abc import Iterator

from torch.utils.data import DataLoader, IterableDataset

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import UsageError
from shardmill.loader.reader import read_split
from shardmill.values import Batch

dataset = open_dataset(sys.argv[1])


class Batches(IterableDataset):
    """Steps of the split `train`."""

    def __init__(self, begun: Iterator[Batch] | None) -> None:
        self._begun = begun

    def __iter__(self) -> Iterator[int]:
        for batch in self._begun or read_split(dataset, "train", batch_size=50):
            yield batch.step


def loaded(begun: Iterator[Batch] | None) -> list[int]:
    return list(DataLoader(Batches(begun), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=30))


if __name__ == "__main__":
    print("in the worker:", sorted(set(loaded(None))))
    begun = iter(read_split(dataset, "train", batch_size=50))
    next(begun)
    try:
        print("begun here:", loaded(begun))
    except UsageError as error:
        print("begun here:", str(error).replace("\n", " "))
