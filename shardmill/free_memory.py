"""How much memory this machine, or the container of this process, has left."""

from __future__ import annotations

from pathlib import Path


def free_bytes(root: Path = Path("/")) -> int:
    """Return the host's available memory, or this container's remaining limit if lower; 0 if unknown."""
    found = [1024 * int(line.split()[1]) for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    group = root / "sys/fs/cgroup"
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and limit[0].isdigit() and used:
        # Pages of files are given back when memory is needed.
        files = sum(int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("inactive_file "))
        found.append(max(0, int(limit[0]) - int(used[0]) + files))
    return min(found, default=0)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
