"""PowerSGD: what is applied, and what is kept for later steps, are together the gradients; at any number of ranks."""

from __future__ import annotations

import random
import shutil
from typing import Any

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.loader.samples import read_samples
from tests.processes import in_own_process
from tests.train.ranks import kill_on_ranks, train_on_ranks
from train.checkpoints.state import dump_arrays
from train.config import TrainConfig
from train.strategies.compression import matrix_of, remembered_bytes, sent_bytes
from train.strategies.powersgd import DIRECTIONS, LowRankSums, residual_file

ROWS, COLUMNS, RANK = 24, 40, 2
CONFIG = {"num_streams": 6, "global_batch_size": 24, "epochs": 4, "learning_rate": 0.01, "checkpoint_every_steps": 2,
          "model": "tests.train.torch_models:routed_normed", "sync_batch_norm": True, "gradient_clip_norm": 2.0,
          "strategy": "torch_ddp", "compression": "powersgd", "label_smoothing": 0.1}  # fmt: skip


class Ranks:
    """The sums of several ranks, added up by hand."""

    def __init__(self, num_ranks: int) -> None:
        import torch

        from train.strategies.powersgd import LowRank

        self.gradients = [torch.zeros(ROWS, COLUMNS) for _ in range(num_ranks)]
        self.low = [LowRank(each, RANK) for each in self.gradients]
        for each in self.low:
            each.begin(torch.Generator().manual_seed(1))

    def step(self, gradients: list[Any]) -> Any:
        """-> what all of them apply."""
        import torch

        for place, gradient in zip(self.gradients, gradients, strict=True):
            place.copy_(gradient)
        for size, act in ((ROWS, "project"), (COLUMNS, "project_back")):
            sent = [torch.zeros(size * RANK) for _ in self.low]
            for low, part in zip(self.low, sent, strict=True):
                getattr(low, act)(part)
            summed = torch.stack(sent).sum(dim=0)
            for part in sent:
                part.copy_(summed)
        applied = [low.summed() for low in self.low]
        assert all(torch.allclose(each, applied[0], rtol=0, atol=0, equal_nan=True) for each in applied)
        return applied[0]

    def settle(self) -> None:
        for low in self.low:
            low.keep_residual()

    def lost(self) -> Any:
        import torch

        return torch.stack([low.residual_nm for low in self.low]).sum(dim=0)


def seeded() -> Any:
    import torch

    seed = random.randrange(2**32)
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def test_gradients_whose_sum_has_that_rank_are_applied_whole():
    import torch

    generator = seeded()
    for _ in range(5):
        ranks = Ranks(2)
        columns, rows = (torch.randn(2, size, generator=generator) for size in (ROWS, COLUMNS))
        gradients = [torch.outer(*each) for each in zip(columns, rows, strict=True)]
        whole = gradients[0] + gradients[1]
        assert float((ranks.step(gradients) - whole).norm()) < 1e-4 * float(whole.norm())
        ranks.settle()
        assert float(ranks.lost().norm()) < 1e-4 * float(whole.norm())


def test_what_was_applied_and_what_is_lost_are_the_gradients_on_any_number_of_ranks():
    """Two worlds have gradients of the same sums. One step is not applied and comes again, one has no gradient."""
    import torch

    generator = seeded()
    one, three = Ranks(1), Ranks(3)
    given, applied = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    for step in range(40):
        gradients = [torch.randn(ROWS, COLUMNS, generator=generator) * (step != 5) for _ in range(3)]
        whole = torch.stack(gradients).sum(dim=0)
        if step == 3:
            assert not torch.isfinite(three.step([*gradients[:2], gradients[2] / 0])).all()
        found, found_by_one = three.step(gradients), one.step([whole])
        three.settle()
        one.settle()
        given, applied = given + whole, applied + found
        assert torch.allclose(applied + three.lost(), given, atol=1e-3)
        # Gradients that have nothing to do with those before: the ranks' rounding grows from step to step.
        if step < 8:
            assert float((found - found_by_one).norm()) < 1e-3 * float(found.norm())
            assert float((one.lost() - three.lost()).norm()) < 1e-3 * float(one.lost().norm())
    assert float(three.lost().norm()) > 1, "of random gradients a low rank leaves much"


def test_after_steps_without_any_gradient_there_are_directions_again():
    import torch

    ranks = Ranks(2)
    nothing, something = torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    something[-1, -1] = 1.0
    for gradient in (nothing, nothing, something):
        found = ranks.step([gradient, nothing])
        ranks.settle()
        assert torch.allclose(found, gradient, atol=1e-6)


def test_only_what_is_halved_is_a_matrix_whichever_side_the_outputs_are_on():
    assert matrix_of((64, 32, 3, 3), 2) == (64, 288) and matrix_of((3, 3, 32, 64), 2) == (288, 64)
    assert matrix_of((64, 64), 16) == (64, 64) and matrix_of((64, 64), 17) is None
    assert matrix_of((64,), 1) is None and matrix_of((), 1) is None and matrix_of((3, 500), 2) is None


def test_bytes_are_counted():
    gradients = [np.zeros(shape, np.float32) for shape in ((64, 32, 3, 3), (64,))]
    of: Any = {each: TrainConfig(compression=each) for each in ("none", "bf16", "powersgd")}
    assert sent_bytes(gradients, of["none"]) == 4 * (64 * 288 + 64)
    assert sent_bytes(gradients, of["bf16"]) == 2 * (64 * 288 + 64)
    assert sent_bytes(gradients, of["powersgd"]) == 4 * (2 * (64 + 288) + 64)
    assert remembered_bytes(gradients, of["none"]) == 0
    assert remembered_bytes(gradients, of["powersgd"]) == 2 * 4 * 64 * 288


def sums_of(bucket_bytes: int) -> LowRankSums:
    import torch

    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((8, 30), (30,), (40, 8), (9, 12))]
    return LowRankSums(weights, TrainConfig(compression="powersgd", bucket_bytes=bucket_bytes))


def lost_by(sums: LowRankSums) -> list[np.ndarray]:
    """What a rank keeps of its gradients for later steps, one array for each weight that is approximated."""
    return sums.state_files(0)[residual_file(0)]


@pytest.mark.parametrize("num_after", [1, 2, 3, 5])
def test_a_world_of_another_size_continues_with_what_all_ranks_had_lost(num_after):
    """In buckets of another size, too. Each file of losses is read once; at an equal size each rank has its own."""

    before = [sums_of(bucket_bytes=1) for _ in range(3)]
    files: dict[str, bytes] = {}
    for rank, sums in enumerate(before):
        assert len(lost_by(sums)) == 3
        lost = [np.random.default_rng(rank).random(each.shape, np.float32) for each in lost_by(sums)]
        directions = [np.full_like(each, 0.5) for each in sums.state_files(0)[DIRECTIONS]]
        sums.start({residual_file(rank): dump_arrays(lost), DIRECTIONS: dump_arrays(directions)})
        files |= {name: dump_arrays(arrays) for name, arrays in sums.state_files(rank).items()}
    after = [sums_of(bucket_bytes=10_000) for _ in range(num_after)]
    wanted = [sums.files_to_resume(rank, num_after, 3) for rank, sums in enumerate(after)]
    for sums, names in zip(after, wanted, strict=True):
        sums.start({name: files[name] for name in names})
        assert all((each == 0.5).all() for each in sums.state_files(0)[DIRECTIONS])
    read = [name for names in wanted for name in names if name != DIRECTIONS]
    assert sorted(read) == sorted(files.keys() - {DIRECTIONS})
    for each in range(3):
        of_ranks = [[lost_by(sums)[each] for sums in world] for world in (before, after)]
        np.testing.assert_allclose(sum(of_ranks[0]), sum(of_ranks[1]), rtol=1e-5)
        assert num_after != 3 or np.array_equal(of_ranks[0][1], of_ranks[1][1])


def applied_and_lost() -> list[bool]:
    """A world of one: for steps that reach all layers, some or none, and hold some still, whether all is there."""
    import torch

    from train.contracts.world import World
    from train.strategies.torch_ddp import TorchCollective

    collective = TorchCollective(World())
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(6))
    weights = list(layers.parameters())
    sums = LowRankSums(weights, TrainConfig(compression="powersgd", bucket_bytes=1300))
    assert len(lost_by(sums)) == 6
    given, applied = ([torch.zeros_like(each) for each in weights] for _ in range(2))
    found = []
    for used in (range(6), [0, 5], [], [1, 1, 2], range(6)):
        for frozen in ((), (0, 3), (4, 5)):
            for number, layer in enumerate(layers):
                layer.requires_grad_(number not in frozen)
            gradients: list[Any] = []
            for is_summed in (False, True):
                for weight in weights:
                    weight.grad = None
                torch.manual_seed(1)
                hidden = torch.randn(4, 12, requires_grad=True)
                for number in used:
                    hidden = layers[number](hidden).tanh()
                if is_summed:
                    sums.begin()
                hidden.square().sum().backward()
                if not is_summed:
                    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in weights]
            for number, (gradient, sum_of) in enumerate(zip(gradients, sums.finish(), strict=True)):
                given[number] += gradient
                applied[number] += sum_of
            sums.settle()
            lost = map(torch.from_numpy, lost_by(sums))
            missing = [g - a - (next(lost) if g.dim() == 2 else 0) for g, a in zip(given, applied, strict=True)]
            found.append(all(bool(each.abs().max() < 1e-4) for each in missing))
    collective.close()
    return found


@pytest.mark.drill
def test_nothing_of_a_backward_pass_is_missing():
    assert all(in_own_process("torch", applied_and_lost))


@pytest.mark.drill
def test_a_killed_training_continues_with_what_was_lost(tiny_uri, tmp_path):
    """On as many ranks with the same bits, on others with the same losses; all ranks end with equal weights."""
    fresh, undisturbed = train_on_ranks(tiny_uri, tmp_path / "fresh", 2, CONFIG)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", 2, CONFIG, killed_at=7)
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    result, resumed = train_on_ranks(tiny_uri, tmp_path / "killed", 2, CONFIG)
    assert result.resumed_from is not None and "resumed" in resumed.events
    assert killed.losses | resumed.losses == undisturbed.losses
    assert (result.weights_sha256, result.evaluation) == (fresh.weights_sha256, fresh.evaluation)
    assert {"powersgd.npz", "powersgd-00000.npz", "powersgd-00001.npz"} <= {
        file.name for file in (tmp_path / "killed" / result.checkpoint).iterdir()
    }

    _, others = train_on_ranks(tiny_uri, tmp_path / "other", 3, CONFIG)
    assert others.losses.keys() == resumed.losses.keys()
    for step, loss in others.losses.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(undisturbed.losses[step]), rel=1e-5)


@pytest.mark.drill
def test_of_a_batch_that_is_left_out_nothing_is_remembered(tiny_uri, tmp_path, monkeypatch):
    """A NaN that was would be in every later step, and end the training."""
    brightest = max(float(each.image_HWC.sum()) for each in read_samples(open_dataset(tiny_uri), "train", 1000))
    monkeypatch.setenv("SHARDMILL_TEST_BRIGHTEST", str(brightest - 0.5))
    config = {**CONFIG, "model": "tests.train.torch_non_finite_models:dazzled", "sync_batch_norm": False, "epochs": 2,
              "standardize": False, "augment": {"random_crop_padding": 0}, "torch_ddp": {"powersgd_rank": 1},
              "non_finite": {"action": "skip", "max_skipped_in_a_row": 1}}  # fmt: skip
    result, watched = train_on_ranks(tiny_uri, tmp_path, 2, config)
    assert result.num_skipped_steps == 2
    assert sum(not np.isfinite(float.fromhex(loss)) for loss in watched.losses.values()) == 2
