"""Pods of a Kubernetes Indexed Job, which gives each pod its index; the manifest repeats the number of pods."""

from __future__ import annotations

from shardmill.environments import Starter

# Training operators set torchrun's variables. Here a pod is a host, with one process.
KUBERNETES = Starter(
    "a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX", "SHARDMILL_JOB_COMPLETIONS", lambda variables: (0, 1)
)
