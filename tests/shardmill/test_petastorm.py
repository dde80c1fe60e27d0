"""Petastorm reads our Parquet shards as the plain files they are, to the same images and labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.formats.encodings import decode_stored
from shardmill.loader.samples import read_samples
from tests.lab.datasets import make_dataset


@pytest.mark.parametrize("encoding", ["jpeg", "png", "raw", "webp"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_make_batch_reader_gives_the_same_images_and_labels(encoding: str, tmp_path: Path):
    from petastorm import make_batch_reader

    dataset = open_dataset(make_dataset(tmp_path, num_images=60, encoding=encoding))
    options = dataset.manifest.normalize
    expected = {sample.sample_id: sample for sample in read_samples(dataset, "train", 10**6)}
    urls = [Path(uri).as_uri() for uri in dataset.files("train", "parquet")]
    seen = []
    # Its thread and process pools may end an epoch before it began: see docs/LOG.md.
    with make_batch_reader(urls, num_epochs=1, reader_pool_type="dummy") as reader:
        for batch in reader:
            for image, label, sample_id in zip(batch.image, batch.label, batch.sample_id, strict=True):
                # NumPy strips trailing zero bytes from fixed-size strings; the size is known, so nothing is lost.
                height, width, channels = options.image_shape_HWC
                stored = bytes(image).ljust(height * width * channels, b"\0") if encoding == "raw" else bytes(image)
                image_HWC = decode_stored(stored, encoding, options.image_shape_HWC)
                assert np.array_equal(image_HWC, expected[int(sample_id)].image_HWC)
                assert int(label) == expected[int(sample_id)].label
                seen.append(int(sample_id))
    assert sorted(seen) == sorted(expected)
