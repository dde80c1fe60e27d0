"""Sets the first weights of a training that has no checkpoint yet: loads `train.init_from` into rank 0's model.

The other ranks get them as they get fresh ones: by the broadcast with which every training starts. Ranks that hold a
model together read what they hold, each for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.checksummed import with_checksum
from shardmill.jobs.observer import WARNING
from shardmill.storage import Store
from train.checkpoints.arrays import MARKER
from train.contracts.activities import Activity, during
from train.contracts.values import to_json
from train.initialization.initial import (
    InitialFile,
    Initialized,
    arrays_of_checkpoint,
    find_initial,
    listed,
    match_weights,
    read_pinned,
)
from train.records import read_if_whole

if TYPE_CHECKING:
    from train.rank.session import Session

INITIALIZED = "initialized.json"
"""The `Initialized` of a training, in its folder."""
MAX_LISTED = 20
_FEW = 0.5
"""Share of the model's numbers below which a warning is logged; a backbone without its head has most of them."""


def initialize(session: Session) -> None:
    """Raises UsageError if the file does not fit the model, IntegrityError if it is another file by now."""
    config, learner, is_first = session.task.config, session.member.learner, session.member.rank == 0
    if not config.init_from or not (is_first or session.member.reads_its_weights):
        return
    with during(session.reporter, Activity("reading train.init_from")):
        file = read_pinned(config) if is_first else find_initial(config)
        given = arrays_of_checkpoint(file.uri) if file.suffix == MARKER else learner.read_weights(file.opened())
        named = learner.named_weights(given.keys())
        other_classes = file.class_names is not None and file.class_names != session.dataset.manifest.class_names
        match = match_weights(named.shapes, given, named.head, file.uri, other_classes=other_classes)
        named.assign(match.arrays)
    if not is_first:
        return
    found = match.initialized(file.uri, named.shapes)
    session.checkpoints.store.put(f"{session.task.training_dir}/{INITIALIZED}", with_checksum(to_json(found)))
    fields: dict[str, str | int | float] = {
        "source": found.source,
        "loaded": found.num_loaded,
        "weights": found.num_weights,
        "share": found.share,
        "replaced": listed(found.replaced, MAX_LISTED),
        "missing": listed(found.missing, MAX_LISTED),
        "unused": listed(found.unused, MAX_LISTED),
    }
    if found.share < _FEW:
        fields[WARNING] = (
            f"only {found.share:.0%} of the model's numbers come from {found.source}; "
            f"it has no {listed(found.missing) or 'head that fits'}{_other_size(file, session)}"
        )
    session.event("initialized", fields)


def _other_size(file: InitialFile, session: Session) -> str:
    """Why an export of ours has other layers, if images of another size are why."""
    stored_HWC, there = session.dataset.manifest.normalize.image_shape_HWC, file.image_shape_HWC
    here = session.task.config.augment.shape_of(stored_HWC)
    if there is None or there == here:
        return ""
    made_for, has = (" x ".join(map(str, shape_HWC)) for shape_HWC in (there, here))
    return f"; it was trained on images of {made_for}, and this dataset has {has}: set etl.image_size to match"


def read_initialized(store: Store, training_dir: str) -> Initialized | None:
    """Read the record of `initialize`; None if the training began with fresh weights, or from another checkpoint."""
    return read_if_whole(Initialized, store, f"{training_dir}/{INITIALIZED}")
