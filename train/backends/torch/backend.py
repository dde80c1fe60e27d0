"""PyTorch: a learner made of a module, a `torch.optim` optimizer and one step of automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.values import Batch
from train.api import NamedWeights, ServedModel, StatePart, SumInStep
from train.backends.model_spec import ModelSpec
from train.backends.rules import alone, microbatches_of, with_averages
from train.backends.torch.layout import ShardModule, TensorLayout, WholeTensors, kept_whole, total_norm
from train.backends.torch.meta_device import materialize, move_to_meta
from train.backends.torch.model import BuiltModule, build_module, read_weights, shapes_and_head, weights_of
from train.backends.torch.passes import (
    Loss,
    MakePasses,
    Objective,
    Parts,
    Passes,
    Precision,
    SampleDraws,
    WholeModel,
    on_device,
)
from train.backends.torch.recompute import Recomputed
from train.backends.torch.runtime import TorchRecording, device, import_torch, reseed_generators, start_torch
from train.backends.torch.serving import (
    SERVED,
    STATE_FILE,
    load_program,
    program_of,
    served_module,
    write_program,
    write_state,
)
from train.backends.torch.state import ModelState, clear_state, creates
from train.checkpoints.arrays import ArrayLike, WeightFile
from train.config import TrainConfig
from train.contracts.values import StepOutcome
from train.contracts.world import World


class TorchLearner:
    """`train.api.Learner` of a PyTorch module, or of a Keras model on PyTorch."""

    follows_schedule = True

    def __init__(
        self, config: TrainConfig, built: BuiltModule, spec: ModelSpec, sum_in_step: SumInStep | None = None
    ) -> None:
        self.config_sha256, self.outputs_are_logits = built.config_sha256, built.outputs_are_logits
        # A Keras model is exported by Keras on TensorFlow, from the same arrays.
        self.export_backend = "keras" if built.is_keras else "torch"
        # Before anything is computed, and before the optimizer exists.
        creates(config)
        self._config, self._built, self._spec = config, built, spec
        self.classifier = built.classifier
        # As they are now: what is frozen for some epochs is still in training.
        self.classifier.still = () if config.unfreeze_epoch else built.frozen.modules
        self._recomputed = Recomputed(config, built.model, built.is_keras)
        self._recomputed.norms.sum_in_step = sum_in_step or alone
        self._precision = Precision(config.mixed_precision)
        draws = SampleDraws(config, built.model, built.is_keras)
        self.parts = Parts(built.classifier, spec.image_shape_HWC, draws, self._recomputed, self._precision)
        self._passes: Passes = WholeModel(self.parts)
        self.layout: TensorLayout = WholeTensors()
        self._names: tuple[Mapping[str, tuple[int, ...]], tuple[str, ...]] | None = None
        """Shapes and head of the whole model, if this rank has a part of it."""

    @cached_property
    def state(self) -> ModelState:
        """Made when it is first needed, behind `place`: no rank ever has the optimizer of more than its shards."""
        return ModelState(self._config, self._built, self.layout, self._precision)

    @cached_property
    def _loss(self) -> Loss:
        config, spec = self._config, self._spec
        return Loss(spec.labels.kind, self.outputs_are_logits, config.label_smoothing, spec.class_weights)

    @cached_property
    def _served(self) -> Any:
        return served_module(self.classifier, self._spec.labels.kind, self.outputs_are_logits)

    @property
    def whole_model_reason(self) -> str:
        """`BuiltModule.whole_model_reason`."""
        return self._built.whole_model_reason

    @property
    def module(self) -> Any:
        """The `nn.Module` that `train.model` has built."""
        return self._built.model

    @property
    def weights(self) -> list[Any]:
        """Its trainable weights."""
        return self.state.weights

    def place(self, place: ShardModule, layout: TensorLayout, make_passes: MakePasses | None = None) -> dict[str, Any]:
        """Exchange the weights for this rank's shards, whose values are left to chance, and compute as that needs it;
        before anything needs `state`.

        -> the parameters as they were, by name, materialized on the rank that has built them.
        """
        assert "state" not in vars(self), "an optimizer has the weights as they were"
        model = self._built.model
        self._names = shapes_and_head(model)
        values = move_to_meta(model)
        place(model, kept_whole(model))
        materialize(model, device())
        with import_torch().no_grad():
            for name, each in model.named_parameters():
                if not each.requires_grad and values[name].device.type != "meta":
                    each.copy_(values[name])
        self.layout = layout
        self._passes = (make_passes or WholeModel)(self.parts)
        self._built = replace(self._built, frozen=self._built.frozen.placed(model))
        return values

    @property
    def learning_rate(self) -> float:
        return float(self.state.optimizer.param_groups[0]["lr"])

    def gradients(self, batch: Batch, global_weight: int, share_of_streams: float) -> list[Any]:
        metrics = self.differentiate(batch, global_weight, share_of_streams)
        return [*self.own_gradients(), metrics]

    def differentiate(
        self,
        batch: Batch,
        global_weight: int,
        share_of_streams: float,
        before_last: Callable[[Any], None] = lambda metrics: None,
    ) -> Any:
        """Compute the gradients, which are left at the weights. -> (loss, number correct).

        `before_last` is given these before the backward pass that completes the gradients, that of the batch's last
        microbatch.
        """
        torch = import_torch()
        self.classifier.train()
        for weight in self.weights:
            weight.grad = None
        microbatches = list(microbatches_of(batch, self._config.num_accumulated))
        metrics = torch.zeros(2, device=device())
        for microbatch in microbatches:
            is_last = microbatch is microbatches[-1]
            labels_N, weights_N = on_device(microbatch.labels_N), on_device(microbatch.weights_N)
            share = share_of_streams / len(microbatches)
            objective = self._objective(labels_N, weights_N, global_weight, share, metrics)
            before_backward = partial(before_last, metrics) if is_last else lambda: None
            self._passes.differentiate(microbatch, weights_N, objective, before_backward)
        return metrics

    def _objective(
        self, labels_N: Any, weights_N: Any, global_weight: int, share_of_streams: float, metrics: Any
    ) -> Objective:
        """That of a microbatch; loss and number correct are added to `metrics`."""

        def objective(outputs_NK: Any, places: Any) -> Any:
            total, num_correct = self._loss.sums(outputs_NK, labels_N[places], weights_N[places])
            # Divided by the weight of the GLOBAL batch: see train/backends/keras/step.py.
            loss = total / global_weight
            if self._built.is_keras and self._built.model.losses:
                loss = loss + sum(self._built.model.losses) * share_of_streams
            metrics.add_(import_torch().stack([loss.detach(), num_correct]).float())
            return self._precision.objective(loss)

        return objective

    def own_gradients(self) -> list[Any]:
        """The gradients that `differentiate` has left at the weights, in the layout of the weights."""
        zeros = import_torch().zeros_like
        return [zeros(each) if each.grad is None else each.grad.float() for each in self.weights]

    def are_finite(self, addends: list[Any]) -> bool:
        *gradients, metrics = self._precision.unscaled(addends)
        return bool(np.isfinite(self.layout.global_norm(gradients)) and np.isfinite(total_norm([metrics])))

    def apply(self, sums: list[Any], learning_rate: float | None) -> StepOutcome:
        *gradients, metrics = sums
        loss, num_correct = metrics.tolist()
        gradients = self._precision.unscaled(gradients)
        gradient_norm = self.layout.global_norm(gradients)
        is_usable = np.isfinite(loss) and np.isfinite(gradient_norm)
        if np.isfinite(loss) and not is_usable and self._precision.lower():
            return StepOutcome(loss, num_correct, gradient_norm, is_applied=True, overflowed=True)
        if is_usable:
            for group in self.state.optimizer.param_groups:
                group["lr"] = group["lr"] if learning_rate is None else learning_rate
            limit = self._config.gradient_clip_norm
            if limit and gradient_norm > limit:
                gradients = [each * (limit / gradient_norm) for each in gradients]
            for weight, updated, gradient in zip(self.weights, self.state.updated, gradients, strict=True):
                # The optimizer leaves alone what has none.
                updated.grad = self.layout.for_update(gradient).to(weight.dtype) if weight.requires_grad else None
            self.state.optimizer.step()
            self.layout.after_update(self.weights)
            self._precision.after_update()
            if self.state.averages:
                self.state.averages.update()
        return StepOutcome(loss, num_correct, gradient_norm, bool(is_usable))

    def outputs(self, images_NHWC: np.ndarray) -> np.ndarray:
        torch = import_torch()
        self.classifier.eval()
        with torch.no_grad(), self._precision.computing():
            outputs_NK = self._passes.outputs(on_device(images_NHWC)).cpu().numpy()
        self.layout.forget(self._built.model)
        return outputs_NK

    def arrays(self, part: StatePart) -> list[np.ndarray]:
        return self.state.arrays(part)

    def assign(self, part: StatePart, arrays: Sequence[np.ndarray], source: str) -> None:
        self.state.assign(part, arrays, source)

    def averaged(self) -> AbstractContextManager[None]:
        return self.state.averages.swapped() if self.state.averages else nullcontext()

    def read_weights(self, file: WeightFile) -> Mapping[str, ArrayLike]:
        return read_weights(file, self._built.is_keras)

    def named_weights(self, like: Collection[str] = ()) -> NamedWeights:
        named = weights_of(self._built, self.layout, like)
        if self._names is not None:
            named = replace(named, shapes=self._names[0], head=self._names[1])
        return with_averages(named, self.state.averages.begin) if self.state.averages else named

    def freeze(self) -> None:
        self._built.frozen.set_trainable(False)
        self.classifier.still = self._built.frozen.modules

    def unfreeze(self) -> None:
        self._built.frozen.set_trainable(True)
        self.classifier.still = ()
        clear_state(self.state.optimizer, self.state.updated)
        self._precision.begin()

    def reseed(self, rank: int) -> None:
        if not self._built.is_keras:
            reseed_generators(rank)
            return
        arrays = self.arrays(StatePart.OWN)
        moved = [array + np.array([rank, 0], np.uint32) if array.dtype == np.uint32 else array for array in arrays]
        self.assign(StatePart.OWN, moved, f"rank {rank}")

    def weights_sha256(self) -> str:
        return self.state.weights_sha256()

    def predictions(self, images_NHWC: np.ndarray) -> np.ndarray:
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


class TorchBackend:
    """`train.api.Backend` of PyTorch."""

    served, layer_output = SERVED, "train.backends.torch.serving:LAYER_OUTPUT"
    recomputes_sync_batch_norm = True

    def start(self, world: World, seed: int) -> None:
        start_torch(world, seed)

    def build(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        *,
        materialized: bool = True,
        sum_in_step: SumInStep | None = None,
    ) -> TorchLearner:
        return TorchLearner(config, build_module(config, spec, materialized=materialized), spec, sum_in_step)

    def load_served(self, folder: Path) -> ServedModel:
        return load_program(folder / SERVED)

    def record(self, folder: Path) -> TorchRecording:
        return TorchRecording(folder)


TORCH = TorchBackend()
