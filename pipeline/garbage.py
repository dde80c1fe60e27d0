"""How the result of `shardmill gc` is shown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pipeline.printing import counted

if TYPE_CHECKING:
    from pipeline.printing import Rows
    from shardmill.dataset.maintenance.gc import GcReport


def gc_document(uri: str, report: GcReport, *, deleted: bool) -> dict[str, Any]:
    """The document that `gc --json` prints."""
    return {
        "uri": uri,
        "deleted": deleted,
        "expired_versions": list(report.expired),
        "retained_versions": list(report.retained),
        "num_files": len(report.garbage),
        "size_bytes": report.size_bytes,
        "files": [
            {"kind": each.kind, "path": each.file.path, "size_bytes": each.file.size_bytes} for each in report.garbage
        ],
    }


def gc_rows(report: GcReport, *, deleted: bool) -> Rows:
    """Versions, then files by kind."""
    num_files = Counter(each.kind for each in report.garbage)
    rows = [
        ("expired" if deleted else "would expire", _numbers(report.expired)),
        ("retained", _numbers(report.retained)),
    ]
    for kind, number in sorted(num_files.items()):
        size_bytes = sum(each.file.size_bytes for each in report.garbage if each.kind == kind)
        rows.append((kind, f"{counted(number, 'file')}, {size_bytes / 1e6:.1f} MB"))
    total = f"{counted(len(report.garbage), 'file')}, {report.size_bytes / 1e6:.1f} MB"
    rows.append(("deleted" if deleted else "would be deleted", total))
    if not deleted:
        rows.append(("", "nothing was changed; --delete does it"))
    return rows


def _numbers(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions)) or "none"
