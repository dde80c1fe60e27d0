"""Small stand-ins of CIFAR's files, byte for byte in the format of the real ones."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def write_cifar10(folder: Path, num_images: int, *, form: str = "python") -> dict[str, np.ndarray]:
    """The six batches and the names, `python` or `binary`: so many images in each batch, with labels from 0 to 9.

    Returns each file's images_NHWC. Each class is a bright bar at its own place, under noise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    suffix, images = ".bin" if form == "binary" else "", {}
    for seed, name in enumerate(FILES):
        images_NHWC, labels_N = _images(num_images, seed)
        pixels_NK = images_NHWC.transpose(0, 3, 1, 2).reshape(num_images, -1)
        data = python2_batch(pixels_NK, labels_N) if form == "python" else records(pixels_NK, labels_N)
        (folder / f"{name}{suffix}").write_bytes(data)
        images[f"{name}{suffix}"] = images_NHWC
    if form == "python":
        names = {"num_cases_per_batch": num_images, "label_names": list(NAMES), "num_vis": 3072}
        (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    else:
        (folder / "batches.meta.txt").write_text("".join(f"{name}\n" for name in NAMES) + "\n")
    (folder / "readme.html").write_text("<html></html>")
    return images


def records(pixels_NK: np.ndarray, *labels: np.ndarray) -> bytes:
    """The binary version: a byte for each label, then the pixels."""
    return np.hstack([*(each.astype(np.uint8)[:, np.newaxis] for each in labels), pixels_NK]).tobytes()


def python2_batch(pixels_NK: np.ndarray, labels_N: np.ndarray) -> bytes:
    """What Python 2 pickled: its strings are bytes without an encoding, which Python 3 writes in another way."""

    def text(value: bytes) -> bytes:
        return b"U" + struct.pack("<B", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    data = pixels_NK.tobytes()
    dtype = (
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\0K\1tR(K\3" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\0tb"
    )
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + text(b"b") + b"tR"
    shape = b"(" + number(pixels_NK.shape[0]) + number(pixels_NK.shape[1]) + b"t"
    array = empty + b"(K\1" + shape + dtype + b"I00\nT" + struct.pack("<i", len(data)) + data + b"tb"
    labels = b"](" + b"".join(b"K" + struct.pack("<B", label) for label in labels_N.tolist()) + b"e"
    items = (b"batch_label", text(b"training batch")), (b"labels", labels), (b"data", array)
    return b"\x80\x02}q\1(" + b"".join(text(name) + value for name, value in items) + b"u."


def _images(num_images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images_NHWC = rng.integers(0, 60, (num_images, 32, 32, 3), np.uint8)
    labels_N = np.arange(num_images) % 10
    for image_HWC, label in zip(images_NHWC, labels_N, strict=True):
        image_HWC[:, 3 * label : 3 * label + 3, label % 3] += 150
    return images_NHWC, labels_N
