"""PyTorch: a learner made of a module, a `torch.optim` optimizer and one step of automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.values import Batch
from train.backends.backend import ModelSpec, NamedWeights, ServedModel, StatePart, SumInStep
from train.backends.microbatches import microbatches_of
from train.backends.torch.averages import WeightAverages
from train.backends.torch.layout import (
    NamedTensor,
    Place,
    TensorLayout,
    WholeTensors,
    kept_whole,
    named_state_of,
    named_weights_of,
)
from train.backends.torch.losses import Loss
from train.backends.torch.model import BuiltModule, build_module
from train.backends.torch.names import named_weights, read_weights
from train.backends.torch.optimizers import clear_state, creates, empty_like, new_optimizer, norm_of, state_tensors
from train.backends.torch.passes import MakePasses, Objective, Parts, Passes, WholeModel, on_device
from train.backends.torch.precision import Precision
from train.backends.torch.profile import TorchRecording
from train.backends.torch.recompute import Recomputed
from train.backends.torch.runtime import (
    decorrelate_generators,
    device,
    generator_states,
    import_torch,
    restore_generators,
    start_torch,
)
from train.backends.torch.sample_draws import SampleDraws
from train.backends.torch.serving import load_program, program_of, served_module, write_program, write_state
from train.checkpoints.state import arrays_sha256
from train.config import TrainConfig
from train.contracts.step_outcome import StepOutcome
from train.contracts.world import World

SERVED = "torch_export"
STATE_FILE = "state_dict.pt"


class TorchLearner:
    """`train.backends.backend.Learner` of a PyTorch module, or of a Keras model on PyTorch."""

    follows_schedule = True

    def __init__(self, config: TrainConfig, built: BuiltModule, spec: ModelSpec) -> None:
        self.config_sha256, self.outputs_are_logits = built.config_sha256, built.outputs_are_logits
        # A Keras model is exported by Keras on TensorFlow, from the same arrays.
        self.export_backend = "keras" if built.is_keras else "torch"
        creates(config)
        self._config, self._built, self._spec = config, built, spec
        self.classifier = built.classifier
        self._served = served_module(built.classifier, spec.labels.kind, built.outputs_are_logits)
        self._recomputed = Recomputed(config, built.model, built.is_keras)
        self._precision = Precision(config.mixed_precision)
        draws = SampleDraws(config, built.model, built.is_keras)
        self.parts = Parts(built.classifier, spec.image_shape_HWC, draws, self._recomputed, self._precision)
        self._passes: Passes = WholeModel(self.parts)
        self._loss = Loss(spec.labels.kind, built.outputs_are_logits, config.label_smoothing, spec.class_weights)
        self.layout: TensorLayout = WholeTensors()
        self._take_weights()

    def _take_weights(self) -> None:
        """The model's weights as they are now, with a fresh optimizer and fresh averages."""
        config, built = self._config, self._built
        self.classifier.still = () if config.unfreeze_epoch else built.frozen.modules
        # As they are now: what is frozen for some epochs keeps its place among the weights.
        self.weights, self._own = built.parts_of_state()
        self._updated = self.layout.updated(self.weights)
        self.__dict__.pop("_optimizer", None)
        self._averages = WeightAverages(self.weights, config.ema_decay) if config.ema_decay else None

    @cached_property
    def _optimizer(self) -> Any:
        """With the first use: a rank that will keep a part of the model never has the state of all of it."""
        return new_optimizer(self._config, self._built.model, self.weights, self._updated)

    @property
    def module(self) -> Any:
        """The `nn.Module` that `train.model` has built."""
        return self._built.model

    def place(self, place: Place, layout: TensorLayout, make_passes: MakePasses | None = None) -> None:
        """Give the weights another layout, and compute as that needs it; the optimizer starts anew."""
        place(self._built.model, kept_whole(self._built.model))
        self.layout = layout
        self._passes = (make_passes or WholeModel)(self.parts)
        self._built = replace(self._built, frozen=self._built.frozen.placed(self._built.model))
        self._take_weights()

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def gradients(self, batch: Batch, global_weight: int, share_of_streams: float) -> list[Any]:
        figures = self.differentiate(batch, global_weight, share_of_streams)
        return [*self.own_gradients(), figures]

    def differentiate(
        self,
        batch: Batch,
        global_weight: int,
        share_of_streams: float,
        before_last: Callable[[Any], None] = lambda figures: None,
    ) -> Any:
        """Compute the gradients, which are left at the weights. -> (loss, number correct).

        `before_last` is given these before the backward pass that completes the gradients, that of the batch's last
        microbatch.
        """
        torch = import_torch()
        self.classifier.train()
        for weight in self.weights:
            weight.grad = None
        microbatches = list(microbatches_of(batch, self._config.num_microbatches))
        figures = torch.zeros(2, device=device())
        for microbatch in microbatches:
            is_last = microbatch is microbatches[-1]
            labels_N, weights_N = on_device(microbatch.labels_N), on_device(microbatch.weights_N)
            share = share_of_streams / len(microbatches)
            objective = self._objective(labels_N, weights_N, global_weight, share, figures)
            before_backward = partial(before_last, figures) if is_last else lambda: None
            self._passes.differentiate(microbatch, weights_N, objective, before_backward)
        return figures

    def _objective(
        self, labels_N: Any, weights_N: Any, global_weight: int, share_of_streams: float, figures: Any
    ) -> Objective:
        """That of a microbatch; loss and number correct are added to `figures`."""

        def objective(outputs_NK: Any, places: Any) -> Any:
            total, num_correct = self._loss.sums(outputs_NK, labels_N[places], weights_N[places])
            # Divided by the weight of the GLOBAL batch: see train/backends/keras/step.py.
            loss = total / global_weight
            if self._built.is_keras and self._built.model.losses:
                loss = loss + sum(self._built.model.losses) * share_of_streams
            figures.add_(import_torch().stack([loss.detach(), num_correct]).float())
            return self._precision.objective(loss)

        return objective

    def own_gradients(self) -> list[Any]:
        """The gradients that `differentiate` has left at the weights, in the layout of the weights."""
        zeros = import_torch().zeros_like
        return [zeros(each) if each.grad is None else each.grad.float() for each in self.weights]

    def are_finite(self, addends: list[Any]) -> bool:
        *gradients, figures = self._precision.unscaled(addends)
        return bool(np.isfinite(self.layout.norm_of(gradients)) and np.isfinite(norm_of([figures])))

    def apply(self, sums: list[Any], learning_rate: float | None) -> StepOutcome:
        *gradients, figures = sums
        loss, num_correct = figures.tolist()
        gradients = self._precision.unscaled(gradients)
        gradient_norm = self.layout.norm_of(gradients)
        is_usable = np.isfinite(loss) and np.isfinite(gradient_norm)
        if np.isfinite(loss) and not is_usable and self._precision.lower():
            return StepOutcome(loss, num_correct, gradient_norm, is_applied=True, overflowed=True)
        if is_usable:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] if learning_rate is None else learning_rate
            limit = self._config.gradient_clip_norm
            if limit and gradient_norm > limit:
                gradients = [each * (limit / gradient_norm) for each in gradients]
            for weight, updated, gradient in zip(self.weights, self._updated, gradients, strict=True):
                # The optimizer leaves alone what has none.
                updated.grad = self.layout.for_update(gradient).to(weight.dtype) if weight.requires_grad else None
            self._optimizer.step()
            self.layout.after_update(self.weights)
            self._precision.after_update()
            if self._averages:
                self._averages.update()
        return StepOutcome(loss, num_correct, gradient_norm, bool(is_usable))

    def outputs(self, images_NHWC: np.ndarray) -> np.ndarray:
        torch = import_torch()
        self.classifier.eval()
        with torch.no_grad(), self._precision.computing():
            outputs_NK = self._passes.outputs(on_device(images_NHWC)).cpu().numpy()
        self.layout.forget(self._built.model)
        return outputs_NK

    def arrays(self, part: StatePart) -> list[np.ndarray]:
        arrays = [self.layout.local(tensor).cpu().numpy() for tensor in self._of_part(part)]
        if part is StatePart.OWN and not self._built.is_keras:
            arrays += generator_states()
        # PyTorch has no unsigned 32-bit seeds; on TensorFlow, where the model is exported, Keras has.
        return [array.astype(np.uint32) if self._is_seed(array) else array.copy() for array in arrays]

    def assign(self, part: StatePart, arrays: Sequence[np.ndarray], source: str) -> None:
        torch = import_torch()
        tensors, given, generators = list(map(self.layout.local, self._of_part(part))), list(arrays), []
        if part is StatePart.OWN and not self._built.is_keras:
            given, generators = given[: len(tensors)], given[len(tensors) :]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if [array.shape for array in given] != shapes or (generators == []) != (not self._has_generators(part)):
            raise UsageError(
                f"{source} holds {len(given)} arrays that differ in number or shapes",
                f"this model has {len(tensors)} tensors as its {part.name.lower()}",
                "make train.model build the same model as then, or train under another models.uri",
            )
        with torch.no_grad():
            for tensor, array in zip(tensors, given, strict=True):
                tensor.copy_(torch.from_numpy(array.astype(np.int64) if array.dtype == np.uint32 else array.copy()))
        if generators:
            restore_generators(generators)
        if self._averages and part is StatePart.WEIGHTS:
            self._averages.give()

    def averaged(self) -> AbstractContextManager[None]:
        return self._averages.swapped() if self._averages else nullcontext()

    def read_weights(self, data: bytes, suffix: str, where: str) -> dict[str, np.ndarray]:
        if self._built.is_keras:
            from train.backends.keras.names import read_weights as read_weights_of_keras

            return read_weights_of_keras(data, suffix, where)
        return read_weights(data, suffix, where)

    def named_weights(self, like: Collection[str] = ()) -> NamedWeights:
        named, averages = self._named_weights(like), self._averages
        if averages is None:
            return named

        def assign(arrays: Mapping[str, np.ndarray]) -> None:
            named.assign(arrays)
            averages.begin()

        return replace(named, assign=assign)

    def _named_weights(self, like: Collection[str]) -> NamedWeights:
        if self._built.is_keras:
            from train.backends.keras.names import named_weights as named_weights_of_keras

            return named_weights_of_keras(self._built.model, like)
        return named_weights(self._built.model)

    def freeze(self) -> None:
        self._built.frozen.set_trainable(False)
        self.classifier.still = self._built.frozen.modules

    def unfreeze(self) -> None:
        self._built.frozen.set_trainable(True)
        self.classifier.still = ()
        clear_state(self._optimizer, self._updated)
        self._precision.begin()

    def sum_moments_by(self, sum_in_step: SumInStep) -> None:
        self._recomputed.norms.sum_in_step = sum_in_step

    def moving_statistics(self) -> list[int]:
        tensors = self._of_part(StatePart.OWN)
        return [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]

    def decorrelate(self, rank: int) -> None:
        if not self._built.is_keras:
            decorrelate_generators(rank)
            return
        arrays = self.arrays(StatePart.OWN)
        moved = [array + np.array([rank, 0], np.uint32) if array.dtype == np.uint32 else array for array in arrays]
        self.assign(StatePart.OWN, moved, f"rank {rank}")

    def weights_sha256(self) -> str:
        if self._built.is_keras:
            return arrays_sha256(weight.value.detach().cpu().numpy() for weight in self._built.model.weights)
        return arrays_sha256(tensor.cpu().numpy() for tensor in self.layout.state_of(self._built.model))

    def answers(self, images_NHWC: np.ndarray) -> np.ndarray:
        torch = import_torch()
        with torch.no_grad():
            return self._served.eval()(torch.from_numpy(images_NHWC).to(device())).cpu().numpy()

    def check_exportable(self) -> None:
        # A Keras model is exported by Keras on TensorFlow.
        if not self._built.is_keras:
            program_of(self._served, self._spec, self._config.model)

    def write_served(self, folder: Path) -> None:
        write_program(self._served, self._spec, self._config.model, folder / SERVED)

    def write_portable(self, folder: Path, images_NHWC: np.ndarray, max_abs_diff: float) -> str:
        write_state(self._built.model, folder / STATE_FILE)
        return f"{STATE_FILE} holds the weights alone: load them into what train.model builds"

    def _of_part(self, part: StatePart) -> Sequence[Any]:
        match part:
            case StatePart.WEIGHTS:
                return self._averages.averages if self._averages else self.weights
            case StatePart.OPTIMIZER:
                remembered = [*state_tensors(self._optimizer, self._updated), *self._precision.state()]
                if self._averages is None:
                    return remembered
                return [*remembered, self._averages.num_updates, *self.weights]
            case StatePart.OWN:
                return self._own

    def tensors(self, part: StatePart) -> list[NamedTensor]:
        """The tensors of WEIGHTS or OPTIMIZER, in the order of `arrays`, by names that no layout changes."""
        weights = named_weights_of(self._built.model, self.weights)
        if part is StatePart.WEIGHTS:
            return weights
        # Of names and shapes only, because it is asked before the weights are placed.
        empty = empty_like(self._updated)
        remembered = named_state_of(new_optimizer(self._config, self._built.model, self.weights, empty), weights, empty)
        remembered += [NamedTensor(f"loss_scale/{place}", (), "") for place in range(len(self._precision.state()))]
        return [*remembered, NamedTensor("averages/num_updates", (), ""), *weights] if self._averages else remembered

    def _has_generators(self, part: StatePart) -> bool:
        return part is StatePart.OWN and not self._built.is_keras

    def _is_seed(self, array: np.ndarray) -> bool:
        return self._built.is_keras and array.shape == (2,) and array.dtype.kind in "iu"


class TorchBackend:
    """`train.backends.backend.Backend` of PyTorch."""

    served, layer_output = SERVED, "train.backends.torch.layer_output:LAYER_OUTPUT"
    recomputes_sync_batch_norm = True

    def start(self, world: World, seed: int) -> None:
        start_torch(world, seed)

    def build(self, config: TrainConfig, spec: ModelSpec) -> TorchLearner:
        return TorchLearner(config, build_module(config, spec), spec)

    def load_served(self, folder: Path) -> ServedModel:
        return load_program(folder / SERVED)

    def record(self, folder: Path) -> TorchRecording:
        return TorchRecording(folder)


TORCH = TorchBackend()
