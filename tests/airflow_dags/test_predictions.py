"""The operator of predictions submits the job, and tells what it has committed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from airflow_dags.run_folder import RunFolder
from shardmill.jobs.run_files import StageRecord, write_stage_record

if TYPE_CHECKING:
    from airflow_dags.predictions import ShardmillPredictOperator


@pytest.mark.drill
def test_the_operator_submits_the_job():
    more = {"models": "s3://b/models", "out": "s3://b/out", "dataset": "s3://b/photos@2", "top": 3}
    task = _predicting("/configs/photos.toml", **more, options=["--layer", "pool"])
    assert task.application is not None and task.application.endswith("/etl/predict_job.py")
    assert task.application_args is not None
    assert task.application_args[:7] == [
        "s3://b/models", "--config", "/configs/photos.toml", "--out", "s3://b/out", "--top", "3"
    ]  # fmt: skip
    assert task.application_args[-4:] == ["--dataset", "s3://b/photos@2", "--layer", "pool"]
    assert task.stage == "predict" and [each.name for each in task.outlets] == ["predict:new"]


def _predicting(config_file: Path | str, **given: Any) -> ShardmillPredictOperator:
    from airflow.sdk import DAG

    from airflow_dags.predictions import ShardmillPredictOperator

    where = {"models": "m", "out": "o", "workdir": "/work"}
    with DAG("mine"):
        return ShardmillPredictOperator(task_id="predict", config_file=config_file, **{**where, **given})


@pytest.mark.drill
def test_the_configs_spark_decides_where_it_is_submitted_unless_the_dag_does(tmp_path: Path):
    config_file = tmp_path / "photos.toml"
    config_file.write_text(
        '[spark]\nmaster = "spark://host:7077"\n[spark.etl.conf]\n"spark.submit.deployMode" = "client"\n'
        '"spark.hadoop.fs.s3a.secret.key" = "canary"\n'
    )
    task = _predicting(config_file)
    task.submit_as_configured()
    assert (task.master, task.conf) == ("spark://host:7077", {"spark.submit.deployMode": "client"})
    given = _predicting(config_file, master="yarn", conf={"spark.submit.deployMode": "cluster"})
    given.submit_as_configured()
    assert (given.master, given.conf) == ("yarn", {"spark.submit.deployMode": "cluster"})
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException, match="none.toml.*expected a config file that this worker can read"):
        _predicting(tmp_path / "none.toml").submit_as_configured()


def test_what_a_task_hands_on_is_the_version_of_the_predictions(tmp_path):
    made = {"version": 3, "content_digest": "d", "published": True}
    write_stage_record(tmp_path, "r", StageRecord(stage="predict", sections={"predictions": made}))
    assert RunFolder(str(tmp_path), "r").result_of("predict") == ({"version": 3, "content_digest": "d"}, True)
