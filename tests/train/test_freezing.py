"""`train.freeze` holds weights still, to the bit; from `train.unfreeze_epoch` on they learn, also after a resume."""

# pyright: reportArgumentType=false
from __future__ import annotations

import numpy as np
import pytest

from shardmill.errors import UsageError
from tests.lab.scale import exhaustive
from tests.train.learners import batch_of
from tests.train.ranks import TORCH_MODELS, train_on_ranks
from tests.train.test_initial import NORMED, SHAPE, learner, plain
from tests.train.training import Killed, Recorder, train_here
from train.backends import BACKENDS
from train.backends.backend import Learner, StatePart
from train.checkpoints.state import WEIGHTS, load_arrays
from train.config import TrainConfig
from train.initialization.initial import pinned


def step(one: Learner) -> dict[str, np.ndarray]:
    """The weights after an update at a high rate."""
    assert one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), 0.1).is_applied
    return dict(one.named_weights().arrays())


def moved(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> set[str]:
    return {name for name in after if (before[name] != after[name]).any()}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("unfreeze_epoch", [0, 2])
def test_what_is_frozen_does_not_move_nor_do_its_statistics(name, unfreeze_epoch):
    settings = {"unfreeze_epoch": unfreeze_epoch, "optimizer": "adamw", "weight_decay": 0.5}
    one = learner(name, NORMED[name], freeze=("all_but_head",), **settings)
    named, before = one.named_weights(), one.named_weights().arrays()
    all_weights = len(learner(name, NORMED[name]).arrays(StatePart.WEIGHTS))
    assert len(one.arrays(StatePart.WEIGHTS)) == (all_weights if unfreeze_epoch else len(named.head))
    if unfreeze_epoch:
        one.freeze()
    step(one)
    after = step(one)
    assert moved(before, after) == set(named.head)

    if unfreeze_epoch:
        one.unfreeze()
        # An optimizer of many steps that has never seen a weight would begin with steps that are too long for it.
        fresh = learner(name, NORMED[name], freeze=("all_but_head",), **settings).arrays(StatePart.OPTIMIZER)
        assert all(map(np.array_equal, one.arrays(StatePart.OPTIMIZER), fresh))
        assert len(moved(after, step(one))) > len(named.head)


@pytest.mark.parametrize("name", [exhaustive("keras"), "torch"])
def test_weights_learn_from_the_epoch_on_also_in_a_training_that_is_killed_in_each(name, tiny_uri, tmp_path):
    how = {"model": NORMED[name], "epochs": 3, "freeze": ["all_but_head"], "unfreeze_epoch": 1,
           "checkpoint": {"keep": 9}, "checkpoint_every_steps": 1}  # fmt: skip
    whole, parts = Recorder(), Recorder(killed_at=1)
    result = train_here(tiny_uri, tmp_path / "whole", whole, **how)
    num_steps = whole.steps[0].num_steps
    # In the first epoch, after its last step, and in the middle of the second.
    for killed_at in (1, num_steps, num_steps + 2):
        recorder = Recorder(killed_at=killed_at)
        with pytest.raises(Killed):
            train_here(tiny_uri, tmp_path / "parts", recorder, **how)
        parts.steps += recorder.steps
    again = train_here(tiny_uri, tmp_path / "parts", parts_end := Recorder(), **how)
    parts.steps += parts_end.steps
    assert again.weights_sha256 == result.weights_sha256 and parts.losses == whole.losses

    folders = sorted((tmp_path / "whole" / "t" / "checkpoints").iterdir())
    first, frozen, last = (load_arrays((folders[step] / WEIGHTS).read_bytes()) for step in (0, num_steps - 1, -1))
    head = [(a != b).any() for a, b in zip(first, frozen, strict=True)]
    assert sum(head) == 2 and all((a != b).any() for a, b in zip(frozen, last, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_pattern_that_names_nothing_is_refused(name):
    with pytest.raises(UsageError, match=r"train.freeze = 'nothing\*' matches no weight of .*; it has "):
        learner(name, NORMED[name], freeze=("nothing*",))
    with pytest.raises(UsageError, match=r"freezes all weights of"):
        learner(name, NORMED[name], freeze=("*",))


@pytest.mark.drill
@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("small_cnn", {"strategy": "horovod", "num_workers": 2}),
        exhaustive("small_cnn", {"strategy": "multi_worker_mirrored", "num_workers": 2}),
        exhaustive("small_cnn", {"strategy": "mirrored", "num_workers": 1, "mirrored": {"num_devices": 2}}),
        exhaustive("small_cnn", {"strategy": "torch_ddp", "num_workers": 2}),
        # One worker does one step after the other.
        exhaustive("small_cnn", {"strategy": "parameter_server", "num_workers": 1}),
        exhaustive(f"{TORCH_MODELS}:smooth", {"strategy": "torch_ddp", "num_workers": 2}),
        (f"{TORCH_MODELS}:smooth", {"strategy": "local_sgd", "num_workers": 2}),
    ],
)
def test_ranks_start_from_the_same_file_and_unfreeze_together(model, how, tiny_uri, tmp_path):
    how = dict(how)
    name = "torch" if model.startswith(TORCH_MODELS) else "keras"
    given = learner(name, model, seed=3).named_weights().arrays()
    (tmp_path / "given.safetensors").write_bytes(plain(dict(given)))
    settings = {"model": model, "init_from": str(tmp_path / "given.safetensors"), "freeze": ["all_but_head"],
                "unfreeze_epoch": 1, "epochs": 3, "optimizer": "sgd", "learning_rate": 0.02, "schedule": "constant",
                "num_streams": 12,
                "global_batch_size": 24, "label_smoothing": 0.1, "augment": {}}  # fmt: skip
    settings["init_from"] = pinned(TrainConfig(**settings)).init_from
    one = Recorder()
    train_here(tiny_uri, tmp_path / "one", one, **settings)
    assert one.named("initialized")[0]["share"] == 1.0

    _, several = train_on_ranks(tiny_uri, tmp_path / "several", how.pop("num_workers"), {**settings, **how})
    assert "initialized" in several.names and several.losses.keys() == one.losses.keys()
    for place, loss in one.losses.items():
        assert float.fromhex(several.losses[place]) == pytest.approx(float.fromhex(loss), rel=1e-5)
