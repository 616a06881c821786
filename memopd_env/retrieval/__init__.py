"""Search: queries in, ranked passages out, from a list in memory up to a cluster.

Everything here answers :meth:`Retriever.search`. Names are imported when first used, so that an environment with the
built-in word search needs neither FAISS nor a web server nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memopd_env.retrieval.base import Passage, RetrievalError, Retriever

if TYPE_CHECKING:
    from memopd_env.retrieval.dense import DenseRetriever
    from memopd_env.retrieval.http import HTTPRetriever
    from memopd_env.retrieval.sparse import SparseRetriever

_LAZY = {
    "DenseRetriever": "dense",
    "HTTPRetriever": "http",
    "SparseRetriever": "sparse",
}

__all__ = ["DenseRetriever", "HTTPRetriever", "Passage", "RetrievalError", "Retriever", "SparseRetriever"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
