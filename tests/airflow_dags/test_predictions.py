"""The operator of predictions submits the job, and tells what it has committed."""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_dags.predictions import ShardmillPredictOperator
from airflow_dags.run_folder import RunFolder
from shardmill.jobs.run_files import StageRecord, write_stage_record


def test_the_operator_submits_the_job():
    with DAG("mine"):
        task = ShardmillPredictOperator(
            task_id="predict",
            config_file="/configs/photos.toml",
            models="s3://b/models",
            out="s3://b/out",
            workdir="/work",
            dataset="s3://b/photos@2",
            top=3,
            options=["--layer", "pool"],
        )
    assert task.application is not None and task.application.endswith("/etl/predict_job.py")
    assert task.application_args is not None
    assert task.application_args[:7] == [
        "s3://b/models", "--config", "/configs/photos.toml", "--out", "s3://b/out", "--top", "3"
    ]  # fmt: skip
    assert task.application_args[-4:] == ["--dataset", "s3://b/photos@2", "--layer", "pool"]
    assert task.stage == "predict" and [each.name for each in task.outlets] == ["predict:new"]


def test_what_a_task_hands_on_is_the_version_of_the_predictions(tmp_path):
    made = {"version": 3, "content_digest": "d", "published": True}
    write_stage_record(tmp_path, "r", StageRecord(stage="predict", sections={"predictions": made}))
    assert RunFolder(str(tmp_path), "r").result_of("predict") == ({"version": 3, "content_digest": "d"}, True)
