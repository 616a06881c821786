"""Files and folders that appear whole or not at all.

Whatever is written is written under another name in the same folder, flushed to the disk, and renamed at the end: a
full disk, a Ctrl-C or a kill leaves what was there before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync(path: str | Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield the name to write to; it becomes ``path`` when the block ends well, and is removed when it does not."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
