"""The kinds of settings: each field of section `train` declares what changing it means for an existing training.

A field without one identifies the training: changing it starts a new one.
"""

from __future__ import annotations

from shardmill.section import SettingKind

EXECUTION = SettingKind("execution setting: it may differ between two attempts at one training, and starts no new run")
DURATION = SettingKind("duration setting: a longer training continues a shorter one")
DEFAULTED = SettingKind("changing it starts a new run; at its default it is not part of a training's identity")
RESUMABLE = SettingKind("resumable setting: checkpoints do not depend on it, so `--allow-change` may change it")
