"""Answers of an exported PyTorch program, argv[1], to the images of argv[2], by PyTorch alone; as JSON, with labels."""

import json
import sys

import numpy as np
import torch

extra_files = {"class_names.json": ""}
program = torch.export.load(sys.argv[1], extra_files=extra_files)
predictions_NK = program.module()(torch.from_numpy(np.load(sys.argv[2])))
assert not {"train", "shardmill", "tests"} & {name.partition(".")[0] for name in sys.modules}
names = json.loads(extra_files["class_names.json"])
print(
    json.dumps(
        {"probabilities": predictions_NK.tolist(), "label": [names[best] for best in predictions_NK.argmax(dim=1)]}
    )
)
