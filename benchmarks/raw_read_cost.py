"""What a verified read of raw pixels costs, part by part, beside a mapped file and a bare copy: the floor of a loader.

python benchmarks/raw_read_cost.py --scratch DIR [--image-bytes 150528] [--rounds K]

Processor time of one thread for each image: read to memory that is used again and hash it there (what the loader does),
map each chunk and hash it, hash a file that stays mapped; each alone, and with the copy of its images into a batch.
The last row is that copy out of memory alone. The file is in the page cache.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import google_crc32c
import numpy as np

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 1 << 18
NUM_CHUNKS = 32
NUM_BUFFERS = 8
BATCH_ROWS = 256


def read_and_hash(descriptor: int, buffers: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Block by block, so that what is hashed is in the processor's cache."""
    for chunk in range(NUM_CHUNKS):
        target, crc = buffers[chunk % NUM_BUFFERS], 0
        for start in range(0, CHUNK_BYTES, BLOCK_BYTES):
            block = target[start : start + BLOCK_BYTES]
            os.preadv(descriptor, [block.data], chunk * CHUNK_BYTES + start)
            crc = google_crc32c.extend(crc, block)
        yield target


def map_and_hash(descriptor: int) -> Iterator[np.ndarray]:
    """A mapping for each chunk, populated at once."""
    for chunk in range(NUM_CHUNKS):
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(descriptor, CHUNK_BYTES, flags=flags, prot=mmap.PROT_READ, offset=chunk * CHUNK_BYTES)
        data = np.frombuffer(mapped, np.uint8)
        google_crc32c.value(data)
        yield data


def hash_mapped(whole: np.ndarray) -> Iterator[np.ndarray]:
    """Of a file that stays mapped."""
    for chunk in np.split(whole, NUM_CHUNKS):
        google_crc32c.value(chunk)
        yield chunk


def gather(chunks: Iterator[np.ndarray], batch_NB: np.ndarray) -> None:
    """Copy the images of each chunk into rows of a batch."""
    image_bytes = batch_NB.shape[1]
    for chunk in chunks:
        for number in range(len(chunk) // image_bytes):
            batch_NB[number % BATCH_ROWS] = chunk[number * image_bytes : (number + 1) * image_bytes]


def drain(chunks: Iterator[np.ndarray]) -> None:
    for _ in chunks:
        pass


def microseconds(work: Callable[[], None], num_images: int, rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    # The first one fills the page cache, and touches new memory.
    return 1e6 * statistics.median(seconds[1:]) / num_images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", required=True, type=Path)
    parser.add_argument("--image-bytes", type=int, default=224 * 224 * 3)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    file = arguments.scratch / "raw_read_cost.bin"
    file.write_bytes(os.urandom(CHUNK_BYTES) * NUM_CHUNKS)
    try:
        with open(file, "rb", buffering=0) as opened:
            measure(opened.fileno(), arguments.image_bytes, arguments.rounds)
    finally:
        file.unlink()


def measure(descriptor: int, image_bytes: int, rounds: int) -> None:
    buffers = [np.zeros(CHUNK_BYTES, np.uint8) for _ in range(NUM_BUFFERS)]
    batch_NB = np.zeros((BATCH_ROWS, image_bytes), np.uint8)
    size = NUM_CHUNKS * CHUNK_BYTES
    whole = np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), np.uint8)
    ways: dict[str, Callable[[], Iterator[np.ndarray]]] = {
        "read to used memory and hash": partial(read_and_hash, descriptor, buffers),
        "map each chunk and hash": partial(map_and_hash, descriptor),
        "hash a mapped file": partial(hash_mapped, whole),
    }
    num_images = size // image_bytes
    print(
        f"| one thread, us for each image of {image_bytes:,} bytes | alone | and copied into a batch |\n|---|---|---|"
    )
    for name, chunks in ways.items():
        alone = microseconds(lambda chunks=chunks: drain(chunks()), num_images, rounds)
        copied = microseconds(lambda chunks=chunks: gather(chunks(), batch_NB), num_images, rounds)
        print(f"| {name} | {alone:.2f} | {copied:.2f} |")
    copy = microseconds(lambda: gather(iter(buffers * (NUM_CHUNKS // NUM_BUFFERS)), batch_NB), num_images, rounds)
    print(f"| copy out of memory | | {copy:.2f} |")


if __name__ == "__main__":
    main()
