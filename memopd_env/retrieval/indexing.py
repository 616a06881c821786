"""From a file of vectors to index files, one block of vectors in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memopd_env.retrieval.index import INDEX, LISTS, REFINE, load_faiss, write_codes
from memopd_env.retrieval.kinds import SCANNED, factory, lists_for

_BLOCK = 65_536
# More than this many vectors per centroid make training longer and lists hardly better.
_TRAIN_PER_LIST = 64


def write_vectors(
    vectors: np.ndarray,
    folder: Path,
    kind: str,
    tell: Callable[[str, int, int], None],
    block: int = _BLOCK,
) -> None:
    """Write the index files of a kind.

    Args:
        vectors: (rows, dim), usually memory-mapped.
        folder: Where to write.
        kind: The kind of index.
        tell: Told the stage, how much is done and how much there is.
        block: Rows added at a time; an ``ivf`` index of more is put together on disk.
    """
    faiss = load_faiss()
    count, dim = vectors.shape

    def trained(name: str, rows: int) -> Any:
        index = faiss.index_factory(dim, name, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            chosen = np.sort(np.random.default_rng(0).choice(count, min(rows, count), replace=False))
            index.train(np.ascontiguousarray(vectors[chosen], np.float32))
        return index

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, count, block):
            yield np.ascontiguousarray(vectors[start : start + block], np.float32)
            tell("index", min(start + block, count), count)

    tell("index", 0, count)
    if kind in SCANNED:
        write_codes(folder / INDEX, trained(factory(kind, dim, count), 100_000), blocks(), count)
        return
    index = trained(factory(kind, dim, count), max(_TRAIN_PER_LIST * lists_for(count), 65_536))
    if kind == "ivf" and count > block:
        _write_lists(index, blocks(), folder)
    else:
        for part in blocks():
            index.add(part)
        faiss.write_index(index, str(folder / INDEX))
    if kind == "ivfpq":
        write_codes(folder / REFINE, trained("SQ8", 100_000), blocks(), count)


def _write_lists(index: Any, blocks: Iterator[np.ndarray], folder: Path) -> None:
    """Write the inverted lists of each block to a file, and merge the files on disk."""
    faiss = load_faiss()
    from faiss.contrib.ondisk import merge_ondisk

    empty = faiss.serialize_index(index)
    parts: list[Path] = []
    row = 0
    for number, vectors in enumerate(blocks):
        part = faiss.deserialize_index(empty)
        part.add_with_ids(vectors, np.arange(row, row + len(vectors)))
        row += len(vectors)
        parts.append(folder / f"part-{number}.faiss")
        faiss.write_index(part, str(parts[-1]))
    merge_ondisk(index, [str(part) for part in parts], str(folder / LISTS))
    faiss.write_index(index, str(folder / INDEX))
    for part in parts:
        part.unlink()
