"""Shows the result of `shardmill gc`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from shardmill.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.output.printing import Rows
    from shardmill.dataset.maintenance.gc import Garbage, GcReport
    from train.garbage import ModelsReport


def gc_document(uri: str, report: GcReport, *, deleted: bool) -> dict[str, Any]:
    """The document that `gc --json` prints."""
    return {
        "uri": uri,
        "deleted": deleted,
        "expired_versions": list(report.expired),
        "retained_versions": list(report.retained),
        **_files_document(report.garbage),
    }


def models_document(uri: str, report: ModelsReport, *, deleted: bool) -> dict[str, Any]:
    """The document that `gc --json` prints for a models folder."""
    return {
        "uri": uri,
        "deleted": deleted,
        "expired_exports": list(report.expired_exports),
        "retained_exports": list(report.retained_exports),
        "expired_trainings": list(report.expired_trainings),
        "retained_trainings": list(report.retained_trainings),
        **_files_document(report.garbage),
    }


def _files_document(garbage: Sequence[Garbage]) -> dict[str, Any]:
    return {
        "num_files": len(garbage),
        "size_bytes": sum(each.file.size_bytes for each in garbage),
        "files": [{"kind": each.kind, "path": each.file.path, "size_bytes": each.file.size_bytes} for each in garbage],
    }


def gc_rows(report: GcReport, *, deleted: bool) -> Rows:
    """Versions, then files by kind."""
    return [
        ("expired" if deleted else "would expire", _numbers(report.expired)),
        ("retained", _numbers(report.retained)),
        *_file_rows(report.garbage, deleted=deleted),
    ]


def models_rows(report: ModelsReport, *, deleted: bool) -> Rows:
    """Exports and trainings, then files by kind."""
    return [
        ("exports that went" if deleted else "exports to delete", _numbers(report.expired_exports)),
        ("exports retained", _numbers(report.retained_exports)),
        ("deleted trainings" if deleted else "trainings to delete", f"{len(report.expired_trainings)}"),
        ("trainings retained", f"{len(report.retained_trainings)}"),
        *_file_rows(report.garbage, deleted=deleted),
    ]


def _file_rows(garbage: Sequence[Garbage], *, deleted: bool) -> Rows:
    num_files = Counter(each.kind for each in garbage)
    rows = []
    for kind, number in sorted(num_files.items()):
        size_bytes = sum(each.file.size_bytes for each in garbage if each.kind == kind)
        rows.append((kind, f"{counted(number, 'file')}, {size_bytes / 1e6:.1f} MB"))
    total = f"{counted(len(garbage), 'file')}, {sum(each.file.size_bytes for each in garbage) / 1e6:.1f} MB"
    rows.append(("deleted" if deleted else "would be deleted", total))
    if not deleted:
        rows.append(("", "nothing was changed; run again with --delete"))
    return rows


def _numbers(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"
