"""The manifests of examples/kubernetes: Kubernetes' schemas accept them, they fit together, and the Job trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pipeline.config import load_pipeline
from shardmill.errors import ShardmillError
from tests.lab.commands import BIN, in_process
from tests.lab.datasets import make_dataset
from tests.services.kubernetes import ApiServer
from tests.services.marked import free_ports
from tests.services.servers import wait_until_up
from tests.services.spark_operator import definition, strict_schema

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "kubernetes"
VERSION = "1.31"
JOB = "base/train-job.yaml"
# The base and its overlays: folders with a `kustomization.yaml`.
VARIANTS = ("base", "overlays/gpu", "overlays/volume")
# The operator's own, of which the package has no schema: `tests.services.spark_operator` fetches it.
OWN_KINDS = {"SparkApplication"}


def documents(file: str) -> dict[str, dict[str, Any]]:
    """By kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8"))}


def variant(folder: str) -> dict[str, dict[str, Any]]:
    """By kind, what `kubectl apply -k` sends."""
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl, which has kustomize")
    done = subprocess.run(["kubectl", "kustomize", FOLDER / folder], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


FILES = sorted(file for file in FOLDER.rglob("*.yaml") if file.name != "kustomization.yaml")
ALL = [document for file in FILES for document in documents(str(file.relative_to(FOLDER))).values()]


@pytest.mark.parametrize(
    "document", [each for each in ALL if each["kind"] not in OWN_KINDS], ids=lambda each: each["kind"]
)
def test_the_published_schema_accepts_it(document: dict[str, Any]):
    """Strictly: a key that Kubernetes does not know is refused."""
    kubernetes_validate.validate(document, VERSION, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**document, "unknown": 1}, VERSION, strict=True)


@pytest.mark.starts("program")
def test_the_variants_are_the_base_on_a_gpu_and_on_a_volume(tmp_path: Path):
    base, gpu, volume = built = [variant(each) for each in VARIANTS]
    for document in (document for each in built for document in each.values()):
        kubernetes_validate.validate(document, VERSION, strict=True)
    # Who would meet the same again is not tried again.
    hopeless = sorted({each.exit_code for each in ShardmillError.__subclasses__() if not each.is_worth_retrying})
    for job in (base["Job"]["spec"], base["CronJob"]["spec"]["jobTemplate"]["spec"]):
        [container] = job["template"]["spec"]["containers"]
        rule = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
        assert (rule["containerName"], rule["values"]) == (container["name"], hopeless)
        assert job["template"]["metadata"]["labels"] == base["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]

    [rank] = gpu["Job"]["spec"]["template"]["spec"]["containers"]
    assert rank["resources"]["limits"] == {"memory": "6Gi", "nvidia.com/gpu": 1}
    # On the volume, nothing needs the bucket.
    assert "s3" in json.dumps(base) and "s3" not in json.dumps(volume)
    (tmp_path / "photos.toml").write_text(volume["ConfigMap"]["data"]["photos.toml"])
    assert load_pipeline(str(tmp_path / "photos.toml"), (), "work").dataset.uri == "/data/dataset"


@pytest.mark.starts("server")
def test_the_operators_schema_accepts_each_application():
    """Strictly, too."""
    validator = jsonschema.Draft202012Validator(strict_schema(definition()))
    applications = [each for each in ALL if each["kind"] in OWN_KINDS]
    assert len(applications) == 2
    for each in applications:
        assert [error.message for error in validator.iter_errors(each)] == []
        for wrong in (
            {"drivr": {}},
            {"type": "Pyton"},
            {"driver": {"cores": "one"}},
            {"restartPolicy": {"retries": 3}},
        ):
            assert not validator.is_valid({**each, "spec": {**each["spec"], **wrong}}), wrong


def test_every_pod_is_as_the_level_restricted_asks():
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    pods = [
        (pod["securityContext"], [container["securityContext"] for container in pod["containers"]])
        for job in (documents(JOB)["Job"], documents("base/gc.yaml")["CronJob"]["spec"]["jobTemplate"])
        for pod in [job["spec"]["template"]["spec"]]
    ]
    for file in "etl.yaml", "train-spark.yaml":
        for name in "driver", "executor":
            part = documents(file)["SparkApplication"]["spec"][name]
            pods.append((part["podSecurityContext"], [part["securityContext"]]))
    assert len(pods) == 6
    for pod, containers in pods:
        assert (pod["runAsNonRoot"], pod["seccompProfile"]["type"]) == (True, "RuntimeDefault")
        for each in containers:
            assert not each["allowPrivilegeEscalation"] and each["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.drill
def test_an_api_server_admits_them(api_server: ApiServer, tmp_path: Path):
    api_server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shardmill"}})
    indexed = documents(JOB)["Job"]
    with pytest.raises(ValueError, match="unknown field"):
        api_server.create({**indexed, "unknown": 1}, "shardmill")
    with pytest.raises(ValueError, match="completions"):
        api_server.create({**indexed, "spec": {**indexed["spec"], "completions": None}}, "shardmill")
    api_server.create(definition())
    group = documents("etl.yaml")["SparkApplication"]["apiVersion"]
    wait_until_up(group, lambda: api_server.serves(group), (), tmp_path, 200)
    with pytest.raises(ValueError, match="unknown field"):
        api_server.create({**documents("etl.yaml")["SparkApplication"], "unknown": 1}, "shardmill")
    admitted = {document["kind"]: api_server.create(document, "shardmill") for document in ALL}
    own = {"ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Service", "Job", "CronJob", "NetworkPolicy"}
    assert admitted.keys() == own | OWN_KINDS | {"PersistentVolumeClaim"}
    assert admitted["Job"]["spec"]["completionMode"] == "Indexed"
    for name in ("gpu", "volume"):
        api_server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        for document in variant(f"overlays/{name}").values():
            api_server.create(document, name)


def config_of(folder: Path | str = "s3://bucket") -> str:
    """The config file that the pods get, with another place in place of the bucket."""
    return documents("base/config.yaml")["ConfigMap"]["data"]["photos.toml"].replace("s3://bucket", str(folder))


@pytest.mark.starts("program")
def test_they_fit_together(tmp_path: Path):
    (tmp_path / "photos.toml").write_text(config_of())
    assert load_pipeline(str(tmp_path / "photos.toml"), (), "work").dataset.uri == "s3://bucket/dataset"
    config, (job, service) = (
        documents("base/config.yaml"),
        (documents(JOB)[each] for each in ("Job", "Service")),
    )
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}

    # Every pod is a rank, and all know how many there are.
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == environment["SHARDMILL_JOB_COMPLETIONS"]
    # Kubernetes names a pod after its Job and index, below the headless Service that its subdomain names.
    assert f"train.attach.host={job['metadata']['name']}-0.{service['metadata']['name']}" in container["args"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["volumes"][0]["configMap"]["name"] == config["ConfigMap"]["metadata"]["name"]

    for file, stage in (("etl.yaml", "etl"), ("train-spark.yaml", "train")):
        application = documents(file)["SparkApplication"]["spec"]
        assert application["mainApplicationFile"] == f"local:///opt/shardmill/{stage}/job.py"
        assert application["driver"]["serviceAccount"] == config["ServiceAccount"]["metadata"]["name"]
        assert application["driver"]["configMaps"][0]["name"] == config["ConfigMap"]["metadata"]["name"]
        arguments = application["arguments"]
        settings = [value for option, value in pairwise(arguments) if option == "--set"]
        done = subprocess.run(
            [sys.executable, str(ROOT / stage / "job.py"), "--help"], capture_output=True, text=True, timeout=200
        )
        assert all(each in done.stdout for each in arguments if each.startswith("--"))
        # A setting that is wrong would be refused by the pod.
        load_pipeline(str(tmp_path / "photos.toml"), tuple(settings), "work")
    assert "train.num_workers=4" in arguments and application["executor"]["instances"] == 4
    # What the image has is where the manifests look for it.
    image = (ROOT / "Dockerfile").read_text()
    assert "COPY dist/shardmill.zip /opt/shardmill/\n" in image
    assert container["command"] == ["shardmill"] and "ENV PATH=/opt/shardmill/.venv/bin:$PATH\n" in image


def test_the_build_context_holds_what_the_image_copies():
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()]
    copies = [words[1:-1] for words in lines if words[:1] == ["COPY"] and not words[1].startswith("--from")]
    copied = {source for sources in copies for source in sources}
    context = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == context
    made = {"dist/shardmill.zip", "dist/shardmill-*.whl"}
    assert made < copied and all((ROOT / source).is_file() for source in copied - made)
    # The extras of each target, and the release of Spark, are those of the project.
    image = " ".join(word for words in lines for word in words)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(re.findall(r"--extra (\w+)", image)) <= project["optional-dependencies"].keys()
    locked = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    versions = [each["version"] for each in locked if each["name"] == "pyspark"]
    assert re.search(r"SPARK=apache/spark:([\d.]+)-", image)[1] in versions  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.drill
def test_the_jobs_command_trains_as_pods_of_an_indexed_job_run_it(tmp_path: Path):
    make_dataset(tmp_path, num_images=60)
    (tmp_path / "photos.toml").write_text(config_of(tmp_path))
    [container] = documents(JOB)["Job"]["spec"]["template"]["spec"]["containers"]
    arguments = [
        each.replace("shardmill-train-0.shardmill-train", "127.0.0.1") for each in here(container["args"], tmp_path)
    ]
    less = (f"train.attach.port={free_ports(1)[0]}", "train.epochs=1", "train.global_batch_size=16")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHARDMILL_"))}
    given = {"SHARDMILL_JOB_COMPLETIONS": "2", "SHARDMILL_JOB_TOKEN": "0123456789abcdef" * 4}
    pods = [
        subprocess.Popen(
            [BIN / "shardmill", *arguments, *(word for each in less for word in ("--set", each))],
            cwd=tmp_path, env={**clean, **given, "JOB_COMPLETION_INDEX": str(index)}, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    said = [pod.communicate(timeout=280)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    summary = json.loads((tmp_path / "work" / "runs" / "monday" / "summary.json").read_text())
    assert (summary["train"]["launcher"], summary["train"]["world_size"]) == ("attach", 2)

    # What the CronJob calls, too, is a command that there is.
    cron = documents("base/gc.yaml")["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    done = in_process(*here(cron["containers"][0]["args"], tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def here(arguments: list[str], folder: Path) -> list[str]:
    """Arguments of a container, with a folder in place of its mount and of the bucket."""
    return [each.replace("/etc/shardmill", str(folder)).replace("s3://bucket", str(folder)) for each in arguments]
