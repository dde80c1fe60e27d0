"""The part of a run's summary and report that a training adds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from shardmill.dataset.dataset import open_pinned
from shardmill.jobs.run_files import StageRecord, dataset_section
from shardmill.stores import open_store
from train.contracts.values import TrainResult
from train.initialization.initial import Initialized
from train.metrics.evaluate import evaluation_section
from train.planning.memory import model_size
from train.rank.initialize import read_initialized
from train.restarts import Restart

if TYPE_CHECKING:
    from train.training import TrainOutcome


def train_record(outcome: TrainOutcome) -> StageRecord:
    """Return training's part of a run's summary and report."""
    result = outcome.result
    plain = TypeAdapter(TrainResult).dump_python(result, mode="json")
    initialized = read_initialized(open_store(outcome.models_uri), result.training_dir)
    return StageRecord(
        stage="train",
        status="skipped" if outcome.skipped else "done",
        sections={
            "dataset": dataset_section(result.dataset, open_pinned(result.dataset).manifest),
            "train": {
                "strategy": result.strategy,
                "strategy_reason": _reason(outcome),
                "memory": outcome.plan.fitted.reason if outcome.plan.fitted else "",
                "exchange": outcome.exchange,
                "launcher": outcome.plan.config.launcher,
                "world_size": result.world_size,
                "devices": [str(each) for each in result.placement],
                "epochs": result.num_epochs,
                "steps": result.num_steps,
                "seconds": result.seconds,
                "images_per_second": result.images_per_second,
                "time_shares": plain["time_shares"],
                "rank_times": [asdict(each) for each in outcome.rank_times],
                "verdict": None if outcome.verdict is None else asdict(outcome.verdict),
                "skipped_steps": result.num_skipped_steps,
                "overflowed_steps": result.num_overflowed_steps,
                "final_loss_hex": result.final_loss_hex,
                "weights_sha256": result.weights_sha256,
                "stopped_early": result.stopped_early,
                "resumed_from": plain["resumed_from"],
                "exported": result.exported,
                "weights_epoch": result.weights_epoch,
                "caution": result.caution,
                "continued_from": result.continued_from,
                "restarts": TypeAdapter(tuple[Restart, ...]).dump_python(outcome.restarts, mode="json"),
                "training_dir": result.training_dir,
                "mlflow_run_id": outcome.mlflow_run_id,
                "initialized": TypeAdapter(Initialized | None).dump_python(initialized, mode="json"),
            },
            "evaluation": evaluation_section(result.evaluation),
        },
        detail={
            "history": plain["history"],
            "evaluation": plain["evaluation"],
        },
    )


def _reason(outcome: TrainOutcome) -> str:
    """Of what was chosen, with the size of the model, which is known now."""
    size = model_size(open_store(outcome.models_uri), outcome.result.checkpoint)
    available = outcome.plan.fitted.available if outcome.plan.fitted else ""
    within = f"; a rank may use {available}" if available else ""
    return f"{outcome.plan.setup.reason}; {size}{within}" if size else outcome.plan.setup.reason
