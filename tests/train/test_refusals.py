"""Settings that do not fit together are refused before anything starts, each with what to set."""

# pyright: reportArgumentType=false
from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from tests.train.learners import LINEAR, TORCH_MODELS
from tests.train.training import check_terms
from train.config import TrainConfig

SERVED = {"strategy": "parameter_server", "launcher": "local"}
SILOS = {
    "model": f"{TORCH_MODELS}:smooth", "strategy": "local_sgd", "launcher": "local",
    "local_sgd": {"silos": ("a@1", "b@3", "c@2")}, "num_workers": 3,
}  # fmt: skip
STAGES = {"strategy": "pipeline_parallel", "num_workers": 2, "launcher": "local", "model": "vit"}
SYNC = {"sync_batch_norm": True}
RECOMPUTE = {"memory": {"activation_checkpointing": "on"}}
AVERAGE = {"launcher": "local", "ema_decay": 0.9}
WEIGHTS = {"strategy": "horovod", "launcher": "local", "rank_weights": (1, 2)}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"global_batch_size": 64, "num_streams": 8, "num_workers": 3, "accumulation_steps": 17},
     r"accumulation_steps = 17; expected at most 16, the samples of a step"),
    # Backends
    ({"model": LINEAR["torch"], "strategy": "horovod"},
     r"'horovod' with the backend 'torch', which train.model = .*'torch_ddp'"),
    ({"strategy": "torch_ddp", "backend": "keras"},
     r"'torch_ddp' with the backend 'keras'; it runs with torch; set train.strat"),
    *(({"model": model, "backend": "torch", "launcher": "inline"},
       "a process can load only one Keras backend; set train.launcher = 'local'")
      for model in ("small_cnn", LINEAR["keras"])),
    # Launchers
    ({"strategy": "torch_ddp", "launcher": "horovod_spark", "num_workers": 2},
     r"'torch_ddp' with train.launcher = 'horovod_spark'; .* set .* to 'local'"),
    *(({"max_restarts": 1, "launcher": launcher},
       r"max_restarts = 1 with .*; set train.launcher to 'local' or 'spark_barrier'")
      for launcher in ("inline", "attach")),
    # Compression
    ({"strategy": "single", "compression": "fp16"}, r"'single'; it has 'none'; set .* to 'horovod' or 'torch_ddp'"),
    ({"strategy": "horovod", "compression": "bf16"}, r"it has 'none' and 'fp16'; .* to 'torch_ddp'"),
    ({"strategy": "local_sgd", "compression": "bf16"}, r"train.strategy to 'torch_ddp'"),
    # What ranks of one strategy do that another cannot
    ({"strategy": "mirrored", "non_finite": {"action": "skip"}},
     r"non_finite.action = 'skip' with .* 'mirrored'.*'single' or 'horovod'"),
    ({"num_workers": 2, "strategy": "multi_worker_mirrored", "launcher": "local", "log": {"profile_steps": "3:5"}},
     r"profile_steps = '3:5' with .*'multi_worker_mirrored'; .*set .* 'horovod'"),
    ({**AVERAGE, "strategy": "parameter_server"}, "train.ema_decay = 0.9 with .*; remove train.ema_decay"),
    ({**AVERAGE, "strategy": "local_sgd", "local_sgd": {"silos": ("a@1", "b@1")}, "num_workers": 2},
     "train.ema_decay = 0.9 with .*; remove train.ema_decay"),
    ({**WEIGHTS, "num_workers": 3}, r"one weight for each of train.num_workers = 3; set .* = 2"),
    ({**WEIGHTS, "num_workers": 2, "reader": "petastorm"}, "train.rank_weights with train.reader = 'petastorm'"),
    ({**RECOMPUTE, **SERVED},
     r"train.memory.activation_checkpointing = 'on' with train\..*; use only one of the two"),
    ({**RECOMPUTE, **SYNC, "strategy": "horovod", "num_workers": 2},
     r"train.memory.activation_checkpointing = 'on' with train\..*; use only one of the two"),
    # Batch norms
    ({**SYNC, **SERVED},
     r"train.sync_batch_norm = true with train.*'parameter_server'; .*; set train.strategy to 'single'"),
    ({**SYNC, "strategy": "local_sgd", "local_sgd": {"local_steps": 2}}, "train.sync_batch_norm = true with train.*"
     "'local_sgd'; expected a strategy that sums statistics of batch norms over ranks within a step; set"),
    ({**SYNC, "strategy": "torch_fsdp", "num_workers": 2, "launcher": "local", "model": "vit"},
     r"train.sync_batch_norm = true with train.*'torch_fsdp'; .*; set train.strategy to 'torch_ddp', or "
     r"train.sync_batch_norm = false"),
    ({**SYNC, "accumulation_steps": 2},
     r"train.sync_batch_norm = true with train.*accumulation_steps = 2; .*; set train.accumulation_steps = 1"),
    # Local updates, and silos
    ({"strategy": "horovod", "local_sgd": {"local_steps": 2}},
     r"local_sgd.local_steps = 2 with train.strategy = 'horovod'; which does not"),
    ({"strategy": "local_sgd", "mixed_precision": "float16"}, r"'float16' with train.strategy = 'local_sgd'"),
    ({"strategy": "local_sgd", "num_workers": 2, "accumulation_steps": 4, "local_sgd": {"local_steps": 9}},
     r"_steps = 4 times train.local_sgd.local_steps = 9; expected at most 32"),
    ({**SILOS, "num_workers": 2},
     r"sgd.silos names 3 datasets, and train.num_workers = 2; .*; set train.num_workers = 3"),
    ({**SILOS, "local_sgd": {"silos": ("a@1", "b", "c@2")}}, r"train.local_sgd.silos names b without a version"),
    ({**SILOS, "launcher": "spark_barrier"}, r"without 2 ranks, .* a lost process ends the job; set .* to 'local'"),
    ({**SILOS, "launcher": "attach"}, r"a lost process ends the job; set .* to 'local'"),
    ({**SILOS, "strategy": "horovod", "model": "small_cnn"},
     r"train.local_sgd.silos = .* with train.strategy = 'horovod'"),
    # A server of parameters
    ({**SERVED, "launcher": "inline"}, r"it needs 3 processes: 1 chief, 1 worker and 1 server; set .* 'local'"),
    ({**SERVED, "accumulation_steps": 2}, r"accumulation_steps = 2 .*; remove it, or lower train.global_batch_size"),
    ({**SERVED, "mixed_precision": "float16"}, r"set train.mixed_precision = 'bfloat16'"),
    ({**SERVED, "non_finite": {"action": "skip"}}, "expected a strategy that can skip a batch"),
    ({**SERVED, "compression": "fp16"}, r"it has 'none'"),
    ({**SERVED, "reader": "petastorm"}, r"a chief dispatches the steps of the epoch plan"),
    ({**SERVED, "launcher": "horovod_spark"}, r"set train.launcher to 'local' or 'spark_barrier'"),
    ({**SERVED, "launcher": "attach"}, r"set train.launcher to 'local' or 'spark_barrier'"),
    ({**SERVED, "backend": "torch"}, r"'parameter_server' with the backend 'torch'"),
    ({**SERVED, "launcher": "spark_barrier"}, r"a training of 3 ranks, .*expected at least 3 slots"),
    # Stages
    ({**STAGES, "global_batch_size": 24, "pipeline_parallel": {"num_microbatches": 16}},
     r"num_microbatches = 16; expected one of 2, .* 24 rows"),
    ({**STAGES, "freeze": ("embedding*",), "unfreeze_epoch": 1, "pipeline_parallel": {"schedule": "zero_bubble"}},
     r"'zero_bubble' with train.unfreeze_epoch; .* set .*schedule = '1f1b'"),
    ({**STAGES, "model": "resnet50"}, r"'resnet50' is a Keras model, and train.strategy = 'pipeline_parallel'"),
]  # fmt: skip


@pytest.mark.needs("horovod")
@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str):
    master = "local[4]" if "silos" in settings.get("local_sgd", {}) else "local[2]"
    with pytest.raises(UsageError, match=message):
        check_terms(TrainConfig(**settings), SparkConfig(master=master))


@pytest.mark.parametrize(
    ("settings", "conf", "message"),
    [
        ({}, {"spark.executor.instances": "four"}, r"spark.executor.instances = 'four'.*expected a whole number"),
        ({"num_workers": 2, "strategy": "torch_ddp", "launcher": "spark_barrier"},
         {"spark.dynamicAllocation.enabled": "true"},
         r"set spark.dynamicAllocation.enabled = false and spark.executor.instances"),
    ],
)  # fmt: skip
def test_settings_of_spark_that_ranks_cannot_use_are_refused(settings, conf, message):
    with pytest.raises(UsageError, match=message):
        check_terms(TrainConfig(**settings), SparkConfig(master="yarn", train=SparkApplicationConfig(conf=conf)))


@pytest.mark.needs("horovod")
@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"global_batch_size": 64, "num_streams": 8, "num_workers": 3, "accumulation_steps": 16}, {}),
        ({"model": LINEAR["torch"]}, {"backend": "torch"}),
        ({"backend": "torch"}, {"launcher": "local"}),
        ({"strategy": "local_sgd", "local_sgd": {"local_steps": 4}}, {"backend": "keras"}),
        (SERVED, {}),
        ({**SYNC, "strategy": "horovod", "num_workers": 2}, {}),
    ],
)
def test_settings_that_are_nearly_the_same_are_not(settings, chosen):
    found = check_terms(TrainConfig(**settings), SparkConfig()).config
    assert {name: getattr(found, name) for name in chosen} == chosen


def test_a_rank_without_rows_is_refused():
    with pytest.raises(ValidationError, match="greater than 0"):
        TrainConfig(num_workers=2, strategy="horovod", launcher="local", rank_weights=(1, 0))
