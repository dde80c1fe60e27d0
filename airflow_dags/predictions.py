"""The operator that predicts all images of a source by `spark-submit`, for DAGs of your own (docs/predict.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import AssetAlias
from airflow.sdk.exceptions import AirflowFailException

from airflow_dags.config_file import master_of, plain_settings, read_config
from airflow_dags.operators import RUN_ID, ShardmillSparkOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


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
        from shardmill.registry import applications_home

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
        self.config_file = Path(config_file)

    def execute(self, context: Context) -> dict[str, Any]:
        self.submit_as_configured()
        return super().execute(context)

    def submit_as_configured(self) -> None:
        """Take `spark.master` and `[spark.etl]` of the config file on this worker; what the DAG gave goes first.

        Raises AirflowFailException if it cannot be read.
        """
        try:
            config = read_config(self.config_file)
        except (OSError, ValueError) as error:
            raise AirflowFailException(
                f"{self.config_file}: {error}; expected a config file that this worker can read"
            ) from error
        self.master = self.master or master_of(config)
        self.conf = {**plain_settings(config, "etl"), **(self.conf or {})}
