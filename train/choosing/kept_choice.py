"""What `auto` stood for when a training was begun: kept in its folder, so that every resume goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.jobs.observer import WARNING
from shardmill.sealed import seal
from shardmill.section import Section
from shardmill.storage import Store
from train.choosing.auto import AUTO, Chosen
from train.config import TrainConfig
from train.records import read_kept
from train.reporting.observer import TrainObserver
from train.strategies.options import MirroredOptions
from train.trainings import TrainingChoice

if TYPE_CHECKING:
    from shardmill.jobs.config import SparkConfig

CHOSEN = "chosen.json"
"""The `KeptChoice` of a training, in its folder."""
_ASKED = ("local_devices", "devices")
_AS_BEGUN = "as this training was begun ({})"


class KeptChoice(Section):
    """How the newest attempt at a training was spread, and the settings that it was asked with."""

    ranks_reason: str = ""
    """Empty if it was told how many."""
    strategy: str
    strategy_reason: str
    launcher: str
    launcher_reason: str
    num_workers: int
    local_devices: int
    devices: str
    spark_master: str


def read_choice(store: Store, choice: TrainingChoice) -> KeptChoice | None:
    """Of this training, or of the one that it goes on with; None if it begins now.

    Raises IntegrityError for a record that was altered.
    """
    return _read(store, choice.folders)


def _read(store: Store, folders: Sequence[str]) -> KeptChoice | None:
    """The first there is."""
    fix = "delete it: what `auto` stands for is then chosen again"
    return read_kept(store, folders, CHOSEN, KeptChoice, fix)


def as_begun(
    kept: KeptChoice | None,
    asked: TrainConfig,
    chosen: Chosen,
    spark: SparkConfig,
    observer: TrainObserver,
    check: Callable[[TrainConfig, SparkConfig], object],
) -> Chosen:
    """`chosen`, but of what is `auto` in `asked` what an earlier attempt had chosen, if that passes `check`.

    Other workers or devices that are set, or another Spark master, are a new question, and get a new answer. `check`
    raises UsageError for what cannot run.
    """
    if kept is None:
        return chosen
    now, then = _choice_of(chosen, spark), chosen
    is_same_master = kept.spark_master == now.spark_master
    may_be_other = is_same_master and not asked.num_workers
    same_ranks = may_be_other or kept.num_workers == now.num_workers
    same_spread = same_ranks and all(getattr(kept, name) == getattr(now, name) for name in _ASKED)
    if same_spread and kept.num_workers != now.num_workers:
        then = then.with_ranks(kept.num_workers, _AS_BEGUN.format(kept.ranks_reason or "as set"))
    if same_spread and asked.strategy == AUTO and kept.strategy != now.strategy:
        then = then.with_strategy(kept.strategy, _AS_BEGUN.format(kept.strategy_reason))
    same_place = same_spread and is_same_master
    if same_place and asked.launcher == AUTO and kept.launcher != now.launcher:
        then = then.with_launcher(kept.launcher, _AS_BEGUN.format(kept.launcher_reason))
    try:
        check(then.config, spark)
    except UsageError as error:
        how = f"{kept.num_workers} rank(s), {kept.strategy} ({kept.launcher})"
        was = f"this training was begun with {how}, which does not run now: {error}"
        observer.event("chosen_anew", {"rank": 0, WARNING: was})
        return chosen
    return then


def keep(store: Store, choice: TrainingChoice, chosen: Chosen, spark: SparkConfig) -> None:
    """Write what this attempt is spread by, for those that go on."""
    now, before = _choice_of(chosen, spark), _read(store, [choice.training_dir])
    # The reasons of the first attempt hold as long as its choice does.
    reasons = {name: getattr(now, name) for name in ("ranks_reason", "strategy_reason", "launcher_reason")}
    if before is None or before.model_copy(update=reasons) != now:
        store.put(f"{choice.training_dir}/{CHOSEN}", seal(now.model_dump_json().encode()))


def _choice_of(chosen: Chosen, spark: SparkConfig) -> KeptChoice:
    config = chosen.config
    return KeptChoice(
        ranks_reason=chosen.ranks_reason,
        strategy=config.strategy,
        strategy_reason=chosen.strategy_reason,
        launcher=config.launcher,
        launcher_reason=chosen.launcher_reason,
        num_workers=config.num_workers,
        local_devices=config.options(MirroredOptions).num_devices,
        devices=config.devices,
        spark_master=spark.master,
    )
