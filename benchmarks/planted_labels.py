"""The demo's digits in folders of classes, some of them in a wrong one: for what finds wrong labels."""

from __future__ import annotations

from pathlib import Path

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
