"""What a rank holds while it trains, and the moments in which all of it goes to disk or comes back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shardmill.dataset.dataset import Dataset
from shardmill.epoch_plan import PlanSpec
from shardmill.errors import IntegrityError
from train.backends.keras.optimizer import ChosenOptimizer
from train.backends.keras.runtime import assign_variables, decorrelate_seed_states, dump_variables
from train.backends.keras.step import TrainStep
from train.checkpoint import (
    OPTIMIZER,
    WEIGHTS,
    CheckpointFolder,
    FoundCheckpoint,
    TrainingIdentity,
    check_resumable,
    find_checkpoint,
    rank_file,
    read_checkpoint,
    save_checkpoint,
)
from train.models.build import BuiltModel
from train.progress import BestEpoch, Progress, TimeSpent
from train.strategies.strategy import Collective
from train.values import Reporter, WorkerTask, from_json, to_json


class Stopwatch:
    """Cuts time into laps without gaps, so that the parts of a training's time add up to all of it."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


@dataclass(frozen=True, slots=True)
class Session:
    """What stays the same from the first step to the last."""

    task: WorkerTask
    dataset: Dataset
    plan_spec: PlanSpec
    steps_per_epoch: int
    streams: range
    """The logical streams that this rank owns."""
    built: BuiltModel
    chosen: ChosenOptimizer
    step: TrainStep
    collective: Collective
    checkpoints: CheckpointFolder
    identity: TrainingIdentity
    reporter: Reporter
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def global_step(self, progress: Progress) -> int:
        return progress.cursor.epoch * self.steps_per_epoch + progress.cursor.step

    def tell(self, name: str, fields: dict[str, str | int | float]) -> None:
        """An event, once for all ranks."""
        if self.collective.rank == 0:
            self.reporter.event(name, fields)


def resume(session: Session) -> FoundCheckpoint | None:
    """Load the newest complete checkpoint, chosen by rank 0, and give all ranks the same variables.

    Without one of its own a training begins where the shorter one ended that it continues, if there is one.
    """
    collective, checkpoints = session.collective, session.checkpoints
    model, optimizer = session.built.model, session.chosen.optimizer

    found = None
    if collective.rank == 0:

        def tell_discarded(path: str, reason: str) -> None:
            session.tell("checkpoint_discarded", {"path": path, "reason": reason})

        found = find_checkpoint(checkpoints.store, checkpoints.training_dir, tell_discarded)
        if found is None and session.task.continues:
            try:
                found = read_checkpoint(checkpoints.store, session.task.continues)
            except IntegrityError as error:
                tell_discarded(session.task.continues, str(error))
    choice = collective.broadcast_bytes(to_json(found) if found else b"")
    found = from_json(FoundCheckpoint, choice) if choice else None

    if found:
        check_resumable(found, session.identity)
        if collective.rank == 0:
            source = f"the checkpoint {found.path}"
            assign_variables(model.trainable_variables, found.read(checkpoints.store, WEIGHTS), source)
            assign_variables(optimizer.variables, found.read(checkpoints.store, OPTIMIZER), source)
            assign_variables(model.non_trainable_variables, found.read(checkpoints.store, rank_file(0)), source)
    collective.broadcast_variables([*model.trainable_variables, *optimizer.variables, *model.non_trainable_variables])
    if found and found.marker.world_size == collective.num_ranks:
        own_file = found.read(checkpoints.store, rank_file(collective.rank))
        assign_variables(model.non_trainable_variables, own_file, f"the checkpoint {found.path}")
    else:
        decorrelate_seed_states(model, collective.rank)
    if found:
        cursor = found.marker.progress.cursor
        fields = {"path": found.path, "epoch": cursor.epoch, "step": cursor.step, "world_size": found.marker.world_size}
        session.tell("resumed", {**fields, "global_step": found.marker.global_step})
    return found


def save(session: Session, progress: Progress) -> tuple[Progress, str]:
    """Write a checkpoint of this very moment. -> progress with the time it took, and the checkpoint's path."""
    collective, model = session.collective, session.built.model
    files = {rank_file(collective.rank): dump_variables(model.non_trainable_variables)}
    if collective.rank == 0:
        files[WEIGHTS] = dump_variables(model.trainable_variables)
        files[OPTIMIZER] = dump_variables(session.chosen.optimizer.variables)
    global_step = session.global_step(progress)
    path = save_checkpoint(session.checkpoints, collective, files, session.identity, progress, global_step)
    seconds = session.stopwatch.lap()
    cursor = progress.cursor
    fields = {"path": path, "epoch": cursor.epoch, "step": cursor.step, "global_step": global_step, "seconds": seconds}
    session.tell("checkpoint", fields)
    return progress.after_time(TimeSpent(checkpoint=seconds)), path


def load_best(session: Session, best: BestEpoch | None, last_checkpoint: str) -> BestEpoch | None:
    """Give all ranks the weights of the best epoch, if `train.export` wants them. -> it; None if the last ones count.

    Raises IntegrityError if its checkpoint is damaged.
    """
    if best is None or session.task.config.export == "last":
        return None
    if best.checkpoint == last_checkpoint:
        return best
    collective, store, model = session.collective, session.checkpoints.store, session.built.model
    if collective.rank == 0:
        found = read_checkpoint(store, best.checkpoint)
        assign_variables(model.trainable_variables, found.read(store, WEIGHTS), found.path)
        assign_variables(model.non_trainable_variables, found.read(store, rank_file(0)), found.path)
    collective.broadcast_variables([*model.trainable_variables, *model.non_trainable_variables])
    return best
