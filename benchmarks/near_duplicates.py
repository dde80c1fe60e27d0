"""How long the search for near duplicates takes in random hashes that share 0, 16 or 32 bits.

python benchmarks/near_duplicates.py [--images 200000 1000000] [--bits 3]

A white margin is 16 bits (two of the eight rows of a thumbnail) or more that the hashes of most images have in common.
CPU time of one thread, without reading the hashes.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from results import hardware

from shardmill.data_quality.near_duplicates import connect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--bits", type=int, default=3)
    given = parser.parse_args()
    print(hardware())
    print("| images | bits in common | CPU s | left out |")
    print("|---|---|---|---|")
    for num_images in given.images:
        for common_bits in (0, 16, 32):
            generator = np.random.default_rng(0)
            hashes = np.unique(generator.integers(0, 2**64, num_images, np.uint64) >> np.uint64(common_bits))
            start = time.process_time()
            found = connect(hashes, given.bits)
            taken = time.process_time() - start
            print(f"| {num_images:,} | {common_bits} | {taken:.1f} | {found.is_left_out_U.sum():,} |", flush=True)


if __name__ == "__main__":
    main()
