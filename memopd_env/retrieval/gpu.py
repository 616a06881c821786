"""A vector index on all visible GPUs.

Each GPU holds an equal range of the rows in half precision and answers with its own best; FAISS merges them. The
vectors go from the mapped file to the GPUs block by block, so the machine's memory need not hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from memopd_env.retrieval.errors import BrokenIndexError
from memopd_env.retrieval.index import load_faiss

_BLOCK = 65_536


def shard_ranges(count: int, shards: int) -> list[tuple[int, int]]:
    """Cut ``count`` rows into contiguous ranges that differ by at most one row."""
    edges = [count * shard // shards for shard in range(shards + 1)]
    return list(pairwise(edges))


def fill(target: Any, source: Any, start: int, stop: int, block: int = _BLOCK) -> None:
    """Add rows ``start`` to ``stop`` of one index to another, a block at a time."""
    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        target.add(np.ascontiguousarray(source.reconstruct_n(begin, end - begin), np.float32))


def sharded_flat(source: Any, shards: list[Callable[[], Any]]) -> Any:
    """Spread the vectors of an index over flat indexes, searched together.

    Args:
        source: A flat or scalar-quantised index.
        shards: Makes each shard's empty index.
    """
    faiss = load_faiss()
    # Threaded, and each shard's rows follow those of the one before.
    joined = faiss.IndexShards(source.d, True, True)
    joined.own_indices = True
    for make, (start, stop) in zip(shards, shard_ranges(source.ntotal, len(shards)), strict=True):
        shard = make()
        fill(shard, source, start, stop)
        joined.add_shard(shard)
        shard.this.disown()
    return joined


def to_gpus(index: Any, kind: str) -> Any:
    """Put an index on all visible GPUs.

    Args:
        index: The index on the CPU, best memory-mapped.
        kind: Its kind; ``flat``, ``flat-fp16``, ``sq8``, ``ivf`` and ``ivfpq`` can go.

    Raises:
        BrokenIndexError: If this FAISS has no GPU support, there is no GPU, or the kind cannot go on one.
    """
    faiss = load_faiss()
    count = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    if not count:
        raise BrokenIndexError(
            "no GPU can be used: pip install faiss-gpu-cu12 in place of faiss-cpu on a machine with an NVIDIA GPU, or "
            "leave --gpu out"
        )
    if kind == "hnsw":
        raise BrokenIndexError("an hnsw index cannot go on a GPU: leave --gpu out, or build flat-fp16 or ivfpq")
    if kind in ("ivf", "ivfpq"):
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        options.useFloat16 = True
        return faiss.index_cpu_to_all_gpus(index, co=options)
    resources = [faiss.StandardGpuResources() for _ in range(count)]

    def maker(device: int) -> Callable[[], Any]:
        def make() -> Any:
            config = faiss.GpuIndexFlatConfig()
            config.device = device
            config.useFloat16 = True
            return faiss.GpuIndexFlatIP(resources[device], index.d, config)

        return make

    joined = sharded_flat(index, [maker(device) for device in range(count)])
    # FAISS keeps only a pointer to them.
    joined.gpu_resources = resources
    return joined
