"""Search by meaning: an encoder, a vector index and the passages, one row number for all three.

An index folder is opened as a whole and only as a whole: the manifest says which corpus and encoder belong to it, and
anything else is refused with the reason.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memopd_env.errors import CorpusError
from memopd_env.retrieval.base import Passage
from memopd_env.retrieval.corpus import Corpus
from memopd_env.retrieval.encoders import Encoder, checked, load_encoder
from memopd_env.retrieval.errors import BrokenIndexError
from memopd_env.retrieval.index import INDEX, REFINE, VectorIndex, load_faiss, read_index
from memopd_env.retrieval.kinds import factory
from memopd_env.retrieval.manifest import OFFSETS, Manifest
from memopd_env.retrieval.resources import check_memory


class DenseRetriever:
    """Nearest passages by inner product of unit vectors; safe to search from several threads.

    Args:
        encoder: Makes the vectors of queries; the one that made those of the passages.
        index: The vectors of the passages.
        passages: The passages by row.
        first_row: The passage that the first vector belongs to; not 0 when the index is a shard.
        cached_queries: Vectors of this many recent queries are kept.
        manifest: Of the index folder, if it came from one.
    """

    def __init__(
        self,
        encoder: Encoder,
        index: VectorIndex,
        passages: Sequence[Passage],
        first_row: int = 0,
        cached_queries: int = 10_000,
        manifest: Manifest | None = None,
    ) -> None:
        self.encoder = encoder
        self.index = index
        self.manifest = manifest
        self._passages = passages
        self._first_row = first_row
        self._cached_queries = cached_queries
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_passages(
        cls, passages: Sequence[Passage], encoder: Encoder | str = "hash", kind: str = "flat"
    ) -> DenseRetriever:
        """Encode and index passages in memory.

        Args:
            passages: A list of passages, or an open corpus.
            encoder: An encoder or its name.
            kind: ``flat`` or another kind without a file of its own, i.e. any but ``ivfpq``'s refinement.
        """
        faiss = load_faiss()
        encoder = load_encoder(encoder) if isinstance(encoder, str) else encoder
        vectors = checked(encoder.encode_passages([passage.contents for passage in passages]), passages, encoder)
        index = faiss.index_factory(encoder.dim, factory(kind, encoder.dim, len(passages)), faiss.METRIC_INNER_PRODUCT)
        if len(passages):
            index.train(vectors)
            index.add(vectors)
        return cls(encoder, VectorIndex(index, search={"nprobe": 16}), passages)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        encoder: Encoder | str | None = None,
        corpus: str | Path | None = None,
        mmap: bool = True,
        gpu: bool = False,
        allow_paging: bool = False,
        device: str | None = None,
    ) -> DenseRetriever:
        """Open an index folder that ``memopd retriever build`` made.

        Args:
            folder: The index folder.
            encoder: By default the one that the manifest names; another must give the same vectors.
            corpus: By default where the manifest says; another path must hold the same corpus.
            mmap: Map the index instead of reading it: starts at once, shares memory between processes.
            gpu: Put the index on all visible GPUs, in half precision.
            allow_paging: Do not refuse an index that is larger than the free memory.
            device: Where a torch encoder runs.

        Raises:
            BrokenIndexError: If the folder is damaged, or corpus or encoder are not those it was built with.
            NotEnoughMemoryError: If it would not fit.
            CorpusError: If the corpus is missing.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        if not allow_paging and not gpu:
            check_memory(manifest.kind, manifest.dim, manifest.count, mmap, str(folder))
        passages = open_corpus(folder, manifest, corpus)
        chosen = manifest.encoder if encoder is None else encoder
        chosen = load_encoder(chosen, device=device) if isinstance(chosen, str) else chosen
        manifest.check_encoder(chosen)
        index = open_index(folder, manifest, mmap=mmap, gpu=gpu)
        return cls(chosen, index, passages, manifest.first_row, manifest=manifest)

    def __len__(self) -> int:
        return len(self.index)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query the ``k`` nearest passages, best first; equal scores in the order of rows.

        Raises:
            EncoderError: If the encoder gives something other than finite vectors.
            CorpusError: If a line of the corpus that was found is malformed.
        """
        return self.search_vectors(self.encode(queries), k) if queries else []

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """Vectors of queries, float32 (queries, dim), from the cache where it knows them."""
        known: dict[str, np.ndarray] = {}
        with self._lock:
            for query in queries:
                if query in self._cache:
                    self._cache.move_to_end(query)
                    known[query] = self._cache[query]
        new = list(dict.fromkeys(query for query in queries if query not in known))
        if new:
            known.update(zip(new, checked(self.encoder.encode_queries(new), new, self.encoder), strict=True))
            with self._lock:
                # A query of megabytes is answered, and not kept.
                self._cache.update((query, known[query]) for query in new if len(query) < 2_000)
                while len(self._cache) > self._cached_queries:
                    self._cache.popitem(last=False)
        return np.stack([known[query] for query in queries])

    def search_vectors(self, vectors: np.ndarray, k: int) -> list[list[Passage]]:
        """As :meth:`search`, for vectors float32 (queries, dim)."""
        scores, rows = self.index.search(vectors, k)
        found: list[list[Passage]] = []
        for query_scores, query_rows in zip(scores.tolist(), rows.tolist(), strict=True):
            passages: list[Passage] = []
            for score, row in zip(query_scores, query_rows, strict=True):
                if row >= 0:
                    passage = self._passages[self._first_row + row]
                    passages.append(Passage(passage.id, passage.title, passage.text, score))
            found.append(passages)
        return found


def open_corpus(folder: Path, manifest: Manifest, path: str | Path | None = None) -> Corpus:
    """Open the corpus that belongs to an index folder; refuses any other."""
    chosen = Path(path) if path is not None else manifest.corpus_path(folder)
    if not chosen.is_file():
        raise CorpusError(f"the corpus of {folder} is not at {chosen}: give its path with --corpus")
    packed = chosen.suffix == ".gz"
    corpus = Corpus.open(chosen) if packed else Corpus.with_offsets(chosen, folder / OFFSETS)
    manifest.check_corpus(corpus.path, len(corpus))
    return corpus


def open_index(folder: Path, manifest: Manifest, mmap: bool = True, gpu: bool = False) -> VectorIndex:
    """Open the vectors of an index folder.

    Raises:
        BrokenIndexError: If the file is not what the manifest says.
    """
    index = read_index(folder / INDEX, mmap or gpu)
    if (int(index.ntotal), int(index.d)) != (manifest.count, manifest.dim):
        raise BrokenIndexError(
            f"{folder / INDEX} holds {index.ntotal:,} vectors of {index.d} numbers and the manifest says "
            f"{manifest.count:,} of {manifest.dim}: it belongs to another index; rebuild it"
        )
    refine = read_index(folder / REFINE) if REFINE in manifest.files else None
    if gpu:
        from memopd_env.retrieval.gpu import to_gpus

        return VectorIndex(to_gpus(index, manifest.kind), refine, manifest.search, exclusive=True)
    return VectorIndex(index, refine, manifest.search)
