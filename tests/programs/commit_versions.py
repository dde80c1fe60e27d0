"""Commits versions 1 to argv[2] of the images in argv[1]/images; the images of version N have sides of 7 + N pixels.

Behind each version of argv[3:] it waits for a line.
"""

import sys
from pathlib import Path

from etl.config import EtlConfig
from tests.lab.datasets import build_here

folder, last = Path(sys.argv[1]), int(sys.argv[2])
for version in range(1, last + 1):
    config = EtlConfig(image_size=7 + version, unit_min_images=20, chunk_bytes=2000)
    build_here(str(folder / "images"), str(folder / "dataset"), config)
    if str(version) in sys.argv[3:]:
        sys.stdin.readline()
