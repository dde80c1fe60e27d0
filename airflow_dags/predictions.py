"""The operator that predicts all images of a source by `spark-submit`, for DAGs of your own (docs/predict.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import AssetAlias

from airflow_dags.operators import RUN_ID, ShardmillSparkOperator


class ShardmillPredictOperator(ShardmillSparkOperator):
    """One version of predictions: the current model, or one export, over a dataset or the source of a config file."""

    def __init__(
        self,
        *,
        config_file: str | Path,
        models: str,
        out: str,
        workdir: str,
        dataset: str = "",
        top: int = 1,
        options: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        """`dataset`: `DATASET` or `DATASET@N`, in place of the file's source. `options`: further ones of the job, such
        as `--layer` and its name. `kwargs`: SparkSubmitOperator's.
        """
        from shardmill.user_module import applications_home

        arguments = [models, "--config", str(config_file), "--out", out, "--top", str(top)]
        arguments += ["--workdir", workdir, "--run-id", RUN_ID]
        arguments += [*(["--dataset", dataset] if dataset else []), *options]
        super().__init__(
            stage="predict",
            workdir=workdir,
            application=str(Path(applications_home()) / "etl" / "predict_job.py"),
            application_args=arguments,
            conn_id=kwargs.pop("conn_id", "spark_default"),
            outlets=[AssetAlias(f"{kwargs['task_id']}:new")],
            publishes=out,
            **kwargs,
        )
