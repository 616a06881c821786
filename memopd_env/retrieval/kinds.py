"""The kinds of index, and what each costs before it is built.

| kind          | what a vector becomes                        | a search         | for                            |
|---------------|----------------------------------------------|------------------|--------------------------------|
| ``flat``      | itself, 4 bytes a number                     | exact, reads all | small corpora; the reference   |
| ``flat-fp16`` | 2 bytes a number                             | reads all        | GPUs; half the memory          |
| ``sq8``       | 1 byte a number                              | reads all        | a quarter of the memory        |
| ``ivf``       | itself, in the list of its nearest centroid  | reads some lists | a CPU with memory to spare     |
| ``ivfpq``     | a code of dim/6 bytes; sq8 on disk to refine | reads some lists | Wikipedia in a few GB          |
| ``hnsw``      | itself, and 64 links                         | walks a graph    | speed on a CPU, at most memory |

``memopd retriever build --estimate`` prints :func:`estimate` for any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopd_env.errors import ConfigError

KINDS = ("flat", "flat-fp16", "sq8", "ivf", "ivfpq", "hnsw")
HNSW_LINKS = 32
TRAIN_PER_LIST = 39
MIN_PQ = 256
# The code sizes that FAISS searches on a GPU.
_GPU_CODES = frozenset({1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96})

# Kinds of which a search reads every byte: paging them from disk answers, but in minutes.
SCANNED = ("flat", "flat-fp16", "sq8")


def check_kind(kind: str) -> str:
    """Return the kind; raises ConfigError if there is none of that name."""
    if kind not in KINDS:
        raise ConfigError(f"no index kind is called {kind!r}: use one of {', '.join(KINDS)}")
    return kind


def check_count(kind: str, count: int) -> None:
    """Refuse a kind that cannot be trained on so few vectors.

    Raises:
        ConfigError: Naming the number and the kind to use.
    """
    if kind == "ivfpq" and count < MIN_PQ:
        raise ConfigError(f"{count} passages are too few for ivfpq, which needs {MIN_PQ:,}: use flat")


def lists_for(count: int) -> int:
    """Number of inverted lists: about 2·sqrt(n), a power of two, never so many that training starves."""
    wanted = 2 ** round(math.log2(max(1.0, 2 * math.sqrt(max(count, 1)))))
    return max(1, min(wanted, count // TRAIN_PER_LIST))


def code_bytes(dim: int) -> int:
    """Bytes of a product-quantisation code: a divisor of dim up to dim/6, if possible one for GPUs."""
    sizes = [size for size in range(1, max(1, dim // 6) + 1) if dim % size == 0]
    on_gpu = [size for size in sizes if size in _GPU_CODES and size >= dim / 12]
    return max(on_gpu or sizes)


def factory(kind: str, dim: int, count: int) -> str:
    """The FAISS factory string of a kind at a size."""
    return {
        "flat": "Flat",
        "flat-fp16": "SQfp16",
        "sq8": "SQ8",
        "ivf": f"IVF{lists_for(count)},Flat",
        "ivfpq": f"IVF{lists_for(count)},PQ{code_bytes(dim)}x8np",
        "hnsw": f"HNSW{HNSW_LINKS},Flat",
    }[check_kind(kind)]


def index_bytes(kind: str, dim: int, count: int) -> int:
    """Size of the index proper (without the refine vectors): what a search needs in memory."""
    lists = lists_for(count)
    return {
        "flat": count * dim * 4,
        "flat-fp16": count * dim * 2,
        "sq8": count * dim + dim * 8,
        "ivf": count * (dim * 4 + 8) + lists * dim * 4,
        "ivfpq": count * (code_bytes(dim) + 8) + lists * dim * 4 + 256 * dim * 4,
        "hnsw": count * (dim * 4 + HNSW_LINKS * 8 + 16),
    }[check_kind(kind)]


def refine_bytes(kind: str, dim: int, count: int) -> int:
    """Size of the vectors on disk that only re-order the best candidates."""
    return count * dim + dim * 8 if kind == "ivfpq" else 0


@dataclass(frozen=True)
class Estimate:
    """What an index will cost.

    Attributes:
        kind: The kind of index.
        memory: Bytes of memory for searching at full speed.
        disk: Bytes of the finished folder.
        build_memory: Bytes of memory for building.
        build_disk: Bytes of disk for building, the finished folder included.
        build_seconds: Rough time without encoding, on one CPU core; within a factor of three.
    """

    kind: str
    memory: int
    disk: int
    build_memory: int
    build_disk: int
    build_seconds: float


def estimate(kind: str, dim: int, count: int) -> Estimate:
    """What an index of ``count`` vectors of ``dim`` numbers will cost; arithmetic only, nothing is touched."""
    proper = index_bytes(kind, dim, count)
    disk = proper + refine_bytes(kind, dim, count) + 8 * count
    # The encoded vectors, and for ivf the lists of each block before they are merged.
    staged = count * dim * (4 if kind == "flat" else 2) + (proper if kind == "ivf" else 0)
    base = 300_000_000
    train = min(count, 64 * lists_for(count)) * dim * 4 if kind in ("ivf", "ivfpq") else 0
    held = proper if kind in ("ivfpq", "hnsw") else 0
    # One core: k-means and list assignment about 20 GFLOP/s, an HNSW insertion about dim microseconds.
    lists = lists_for(count)
    seconds = count * dim * 8 / 400e6
    if kind in ("ivf", "ivfpq"):
        seconds += 2 * dim * lists * (count + 10 * min(count, 64 * lists)) / 20e9
    if kind == "ivfpq":
        seconds += count * dim * 256 * 2 / 10e9
    if kind == "hnsw":
        seconds += count * dim * 4e-6
    return Estimate(kind, proper + base, disk, held + train + base, disk + staged, seconds)


def smaller_kinds(dim: int, count: int, budget: int) -> list[str]:
    """Kinds whose index fits into ``budget`` bytes, largest first."""
    sizes = [(index_bytes(kind, dim, count), kind) for kind in KINDS]
    return [kind for size, kind in sorted(sizes, reverse=True) if size <= budget]
