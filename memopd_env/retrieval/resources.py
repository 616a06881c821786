"""Free memory and disk, asked before they are needed.

A container's limit counts, not only what the machine has: a process that ignores it is killed without a message.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from memopd_env.errors import MissingExtraError
from memopd_env.retrieval.errors import NotEnoughDiskError, NotEnoughMemoryError
from memopd_env.retrieval.kinds import SCANNED, index_bytes, smaller_kinds

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that this process may still use."""
    try:
        import psutil
    except ImportError as error:
        raise MissingExtraError("psutil", "retrieval") from error
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        reclaimable = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    return max(0, min(free, int(limit) - used + int(reclaimable.get("inactive_file", 0))))


def readable_bytes(count: float) -> str:
    """A size for people, e.g. ``64.6 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def check_memory(kind: str, dim: int, count: int, mmap: bool, where: str, free: int | None = None) -> None:
    """Refuse to load an index that would not fit.

    A memory-mapped index of a kind that reads only a part per search (``ivf``, ``ivfpq``, ``hnsw``) may be larger than
    the memory; one that reads everything for each search may not.

    Args:
        kind: The kind of index.
        dim: Numbers in a vector.
        count: Vectors.
        mmap: Whether it will be memory-mapped.
        where: The index, for the message.
        free: Bytes of free memory; by default asked now.

    Raises:
        NotEnoughMemoryError: Naming need, free memory and the kinds that would fit.
    """
    if mmap and kind not in SCANNED:
        return
    free = available_memory() if free is None else free
    need = index_bytes(kind, dim, count)
    if need <= free:
        return
    fitting = smaller_kinds(dim, count, free)
    advice = f"build one of the kinds that fit ({', '.join(fitting)})" if fitting else "use a larger machine or shards"
    paging = (
        "" if kind not in SCANNED else "; or allow paging (--allow-paging), which reads it from disk at each search"
    )
    raise NotEnoughMemoryError(
        f"{where} ({kind}, {count:,} x {dim}) needs {readable_bytes(need)} of memory and {readable_bytes(free)} is "
        f"free: {advice}{paging}"
    )


def check_disk(folder: Path, need: int, what: str) -> None:
    """Refuse to begin writing what would not fit.

    Raises:
        NotEnoughDiskError: Naming need and free space.
    """
    free = shutil.disk_usage(folder).free
    if need > free:
        raise NotEnoughDiskError(
            f"{what} needs {readable_bytes(need)} under {folder} and {readable_bytes(free)} is free: free some space, "
            "choose another folder, or a smaller kind (`memopd retriever build --estimate` lists them)"
        )
