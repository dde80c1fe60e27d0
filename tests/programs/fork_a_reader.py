"""Begins to read the dataset argv[1], forks, and prints what the fork gets from the reader in each way of using it."""

import multiprocessing
import sys

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import UsageError
from shardmill.loader.reader import read_batches, read_split
from shardmill.loader.row_source import ReaderOptions
from shardmill.loader.samples import iterate_samples

dataset = open_dataset(sys.argv[1])
spec = dataset.plan_spec("train", seed=0, global_batch_size=8, num_streams=1)
plan = dataset.plan_epoch(spec, 0)


def in_fork(use):
    """What `use` says in a fork that has 20 seconds."""
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()

    def run():
        try:
            said.put(f"read {use()}")
        except UsageError as error:
            said.put(f"UsageError: {error}")

    process = context.Process(target=run)
    process.start()
    process.join(20)
    if process.is_alive():
        process.kill()
        return "hangs"
    return said.get()


def first_step(batches):
    return next(iter(batches)).step


def closed_in_fork():
    with begun:
        return first_step(begun)


for options in (ReaderOptions(prefetch_bytes=1), ReaderOptions()):
    begun = read_batches(dataset, plan, options=options)
    iterator = iter(begun)
    next(iterator)
    print("the iterator:", in_fork(lambda: next(iterator).step))  # noqa: B023
    print("another of its reader:", in_fork(lambda: first_step(begun)))  # noqa: B023
    print("one step:", in_fork(lambda: begun.submit(3).result().step))  # noqa: B023
    print("closed:", in_fork(closed_in_fork))
    # The process that began goes on as if nothing had been.
    print("here:", next(iterator).step)
    begun.close()
of_split = iter(read_split(dataset, "train", batch_size=4))
next(of_split)
print("read_split:", in_fork(lambda: next(of_split).step))
samples = iterate_samples(dataset, "train")
next(samples)
print("samples:", in_fork(lambda: next(samples).sample_id != 0))
not_begun = read_batches(dataset, plan)
print("not begun:", in_fork(lambda: first_step(not_begun)))
