"""Says before the work how many unchanged images of the latest version are decoded again, and why; and limits them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from etl.config import EtlConfig, etl_settings_of
from etl.setting_kinds import REBUILDS_NOTHING
from shardmill.errors import RejectLimitExceeded
from shardmill.words import name_some, printable

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes
    from etl.plan import BuildPlan
    from shardmill.dataset.manifest import Manifest


def check_redecoded(plan: BuildPlan, changes: Changes | None) -> Iterator[str]:
    """A warning, if any. Raises RejectLimitExceeded above `etl.max_redecoded_fraction`.

    `changes`: what was found to differ from the latest version, None if nothing of it is kept.
    """
    parent = plan.parent
    # Another model predicts all of them anew, as it should.
    if (
        parent is None
        or plan.is_append
        or plan.task.mapping is not None
        or not plan.build.source.continues(parent.source)
    ):
        return
    if changes is not None:
        num_images = changes.num_redecoded
    else:
        # Of inputs of which each has changed, nothing could be kept by any settings.
        num_images = 0 if plan.extends_parent else min(parent.counts.accepted, plan.num_images)
    if not num_images:
        return
    what = f"{num_images:,} of the {parent.counts.accepted:,} images of version {parent.version}"
    reasons = "; ".join(_reasons(plan, parent)) or "other settings"
    limit = plan.task.config.max_redecoded_fraction
    if num_images > limit * parent.counts.accepted:
        raise RejectLimitExceeded(
            f"{what} would be decoded again, because of {reasons}",
            f"etl.max_redecoded_fraction allows {limit:g}; nothing was read or published",
            f"go back to the settings and the decoders of version {parent.version}, or raise the limit",
        )
    yield f"{what} are decoded again, because of {reasons}"


def _reasons(plan: BuildPlan, parent: Manifest) -> Iterator[str]:
    build = plan.build
    if parent.decoder_id != build.decoder_id:
        yield f"the decoder ({', '.join(_differences(_parts(parent.decoder_id), _parts(build.decoder_id)))})"
    others = etl_settings_of(REBUILDS_NOTHING)
    before, now = (
        {name: value for name, value in config.items() if name not in others}
        for config in (parent.config, build.config)
    )
    if settings := list(_differences(before, now)):
        yield f"the config ({name_some([f'etl.{each}' for each in settings])})"
    columns = list(_differences(parent.columns, build.columns))
    if columns or parent.class_names != build.class_names[: len(parent.class_names)]:
        yield f"columns and classes ({name_some(columns) or 'classes have other numbers'})"
    if parent.source.names_splits and not build.source.names_splits:
        yield "the splits, which the source names no more"
    if parent.decoder_id == build.decoder_id and not settings and not columns and plan.task.source.image_fields():
        yield f"source.image_field = {printable(plan.task.source.image_fields())}"


def _parts(decoder_id: str) -> dict[str, str]:
    """Name -> version of each part of an id such as `rules-6+pillow-11.0`."""
    found = (re.fullmatch(r"(.+?)-([^-]*)", part) for part in decoder_id.split("+"))
    return {match[1]: match[2] for match in found if match}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        old, new = before.get(name, _default(name)), now.get(name, _default(name))
        if old != new:
            was, is_now = ("none" if each is None else printable(str(each)) for each in (old, new))
            yield f"{name} {was} -> {is_now}"


def _default(name: str) -> Any:
    """Of a setting that an older config did not have."""
    field = EtlConfig.model_fields.get(name)
    return None if field is None else field.get_default(call_default_factory=True)
