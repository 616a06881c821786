"""A FAISS index as rows and scores: search, open, and write without holding it in memory.

Product-quantised vectors are too coarse to order the last few passages, so an ``ivfpq`` index only proposes: its best
candidates are scored again with one-byte-a-number vectors that stay on disk, memory-mapped, of which a search touches
a few dozen. That is how an index of 1/20 the size keeps nearly all of the recall.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from memopd_env.errors import MissingExtraError
from memopd_env.retrieval.errors import BrokenIndexError

DEFAULT_CANDIDATES = 64

_CORE_TYPE = "OPENBLAS_CORETYPE"
_BLAS_FROM = 1025

# Names within an index folder.
INDEX = "index.faiss"
REFINE = "refine.faiss"
LISTS = "index.ivfdata"


def load_faiss() -> Any:
    """The faiss module, set up for batches; raises MissingExtraError with the install command."""
    if "faiss" not in sys.modules:
        # It reports at level INFO each build of itself that it does not find.
        logging.getLogger("faiss.loader").setLevel(logging.WARNING)
    try:
        with _blas_kernels():
            import faiss
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "retrieval") from error
    # Newer versions compare queries x dim with this number, which starts at 128,000: a batch of 64 would be scanned
    # query by query, where a matrix product is faster from two or three queries on (3x at 8, 10x at 64).
    if faiss.cvar.distance_compute_blas_threshold > _BLAS_FROM:
        faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM
    return faiss


@contextmanager
def _blas_kernels() -> Iterator[None]:
    """Let the OpenBLAS inside the FAISS wheel use AVX2 while it is being loaded.

    It is older than many processors, takes those it does not know for one without AVX, and is then ten times slower.
    The variable is read when a library is loaded, so that of numpy, which is loaded by now, is not touched.
    """
    if "faiss" in sys.modules or _CORE_TYPE in os.environ or not _has_avx2():
        yield
        return
    os.environ[_CORE_TYPE] = "Haswell"
    try:
        yield
    finally:
        del os.environ[_CORE_TYPE]


def _has_avx2() -> bool:
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class VectorIndex:
    """Rows and scores for vectors; safe to search from several threads.

    Args:
        index: A FAISS index with inner-product metric.
        refine: A FAISS index of the same rows, read only to score candidates again; None for none.
        search: ``nprobe``, ``efSearch`` and ``candidates`` where the kind has them.
        exclusive: Whether only one thread at a time may search, as on a GPU.
    """

    def __init__(
        self, index: Any, refine: Any = None, search: dict[str, int] | None = None, exclusive: bool = False
    ) -> None:
        self._faiss = load_faiss()
        self.index = index
        self.refine = refine
        self.search_settings: dict[str, int] = {}
        self._exclusive = threading.Lock() if exclusive else None
        self.configure(search or {})

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def dim(self) -> int:
        """Numbers in a vector."""
        return int(self.index.d)

    def configure(self, search: dict[str, int]) -> None:
        """Set search settings; those that the kind does not have are kept and ignored."""
        self.search_settings = dict(search)
        if "nprobe" in search and hasattr(self.index, "nprobe"):
            self.index.nprobe = search["nprobe"]
        if "efSearch" in search and hasattr(self.index, "hnsw"):
            self.index.hnsw.efSearch = search["efSearch"]

    def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The ``k`` best rows for each vector.

        Args:
            vectors: float32 (queries, dim).
            k: How many.

        Returns:
            Scores float32 (queries, k), best first, equal scores in the order of rows; and rows int64 (queries, k), -1
            where there are fewer.
        """
        if len(vectors) == 0 or k < 1 or len(self) == 0:
            return np.zeros((len(vectors), 0), np.float32), np.zeros((len(vectors), 0), np.int64)
        k = min(k, len(self))
        depth = k if self.refine is None else max(k, self.search_settings.get("candidates", DEFAULT_CANDIDATES))
        depth = min(depth, len(self))
        vectors = np.ascontiguousarray(vectors, np.float32)
        if self._exclusive is None:
            scores, rows = self.index.search(vectors, depth)
        else:
            with self._exclusive:
                scores, rows = self.index.search(vectors, depth)
        if self.refine is not None:
            scores = self._refined(vectors, rows)
        order = np.lexsort((rows, -scores), axis=1)[:, :k]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def _refined(self, vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
        distinct, place = np.unique(rows, return_inverse=True)
        stored = np.zeros((len(distinct), self.dim), np.float32)
        real = distinct >= 0
        if real.any():
            stored[real] = self.refine.reconstruct_batch(distinct[real])
        scores = np.einsum("qd,qcd->qc", vectors, stored[place.reshape(rows.shape)])
        return np.where(rows >= 0, scores, -np.inf).astype(np.float32)


def read_index(path: str | Path, mmap: bool = True) -> Any:
    """Read a FAISS file, memory-mapped where FAISS can.

    Raises:
        BrokenIndexError: If the file is missing or not an index.
    """
    faiss = load_faiss()
    try:
        if Path(path).with_name(LISTS).is_file():
            # Lists in a file of their own are always mapped; asking for it again makes FAISS skip them.
            return faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)
        with open(path, "rb") as file:
            inverted = file.read(2) == b"Iw"
        # FAISS maps inverted lists in one way and plain codes in another, and refuses both together.
        flags = (faiss.IO_FLAG_MMAP if inverted else faiss.IO_FLAG_MMAP_IFC) if mmap else 0
        return faiss.read_index(str(path), flags)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1][-200:]
        raise BrokenIndexError(
            f"{path} is not a readable FAISS index ({reason}): it was cut off or is another file; "
            "copy or build it again"
        ) from error


def write_codes(path: str | Path, trained: Any, blocks: Iterable[np.ndarray], count: int) -> None:
    """Write a flat or scalar-quantised index as a stream, holding one block at a time.

    FAISS writes such an index as a header, the length of the codes, and the codes; so the header of the empty index
    with its two counts filled in, followed by the codes of one block after another, is the same file. It is read back
    and compared before it is trusted.

    Args:
        path: The file to write.
        trained: An empty, trained ``IndexFlat`` or ``IndexScalarQuantizer``.
        blocks: float32 (rows, dim) each.
        count: Rows in all blocks together.

    Raises:
        BrokenIndexError: If the file does not read back as what was written.
    """
    faiss = load_faiss()
    header = bytearray(faiss.serialize_index(trained).tobytes())
    unit = 4 if header[:4] == b"IxFI" else 1
    struct.pack_into("<q", header, 8, count)
    struct.pack_into("<Q", header, len(header) - 8, count * trained.sa_code_size() // unit)
    first = last = None
    with open(path, "wb") as file:
        file.write(header)
        for block in blocks:
            codes = trained.sa_encode(np.ascontiguousarray(block, np.float32))
            first = codes[0] if first is None else first
            last = codes[-1]
            # Not tofile, which does not notice a full disk.
            file.write(codes.data)
        file.flush()
        os.fsync(file.fileno())
    written = read_index(path)
    ok = written.ntotal == count and written.d == trained.d
    for row, code in ((0, first), (count - 1, last)):
        if ok and code is not None:
            ok = np.array_equal(written.reconstruct(row), trained.sa_decode(code[None])[0])
    if not ok:
        raise BrokenIndexError(
            f"faiss {faiss.__version__} does not read back {path} as it was written: its file format has changed; "
            "install the version range that pyproject.toml names"
        )
