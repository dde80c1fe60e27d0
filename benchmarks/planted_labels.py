"""The demo's digits in folders of classes, some of them in a wrong one: for what finds wrong labels."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from pipeline.demo.data import digit_key, encode_digit, load_digits


def plant_wrong_labels(folder: Path, share: float, seed: int = 0) -> dict[str, str]:
    """Write all digits; the true label of each one that is in the folder of another class, by key."""
    digits, rng = load_digits(), np.random.default_rng(seed)
    num_digits = len(digits.labels)
    wrong = set(rng.choice(num_digits, int(share * num_digits), replace=False).tolist())
    true_label = {}
    for index, label in enumerate(digits.labels):
        key = digit_key(digits, index)
        if index in wrong:
            key = f"{(label + int(rng.integers(1, 10))) % 10}/{Path(key).name}"
            true_label[key] = str(label)
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(encode_digit(digits, index))
    return true_label


def plant_in_moved_copies(folder: Path, num_images: int, share: float, whole_sources: bool) -> dict[str, str]:
    """Write copies of the digits, each a bit turned, enlarged and moved; those of one digit in one of three splits.

    `whole_sources`: of a digit all copies have the same wrong label, else each copy is drawn for itself. The true label
    of each wrong one, by key.
    """
    digits, rng = load_digits(), np.random.default_rng(0)
    num_digits, side = len(digits.labels), len(digits.images[0])
    num_drawn = num_digits if whole_sources else num_images
    split_of = rng.permutation(num_digits) % 10
    wrong = set(rng.choice(num_drawn, int(share * num_drawn), replace=False).tolist())
    shift_of = rng.integers(1, 10, num_images)
    true_label = {}
    for copy in range(num_images):
        source = copy % num_digits
        drawn = source if whole_sources else copy
        label = digits.labels[source]
        split = {8: "val", 9: "test"}.get(int(split_of[source]), "train")
        given = (label + int(shift_of[drawn])) % 10 if drawn in wrong else label
        key = f"{split}/{given}/{source:04d}_{copy // num_digits}.png"
        if given != label:
            true_label[key] = str(label)
        matrix = cv2.getRotationMatrix2D((side / 2, side / 2), rng.uniform(-12, 12), rng.uniform(0.88, 1.1))
        matrix[:, 2] += rng.uniform(-2, 2, 2)
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / key), cv2.warpAffine(digits.images[source], matrix, (side, side)))
    return true_label


def source_of(key: str) -> int:
    """The number of the digit that a moved copy shows."""
    return int(Path(key).name.split("_")[0])
