"""Take over an index that another tool built, and check one of ours to the last byte.

A bare FAISS file knows neither its corpus nor its encoder. Adopting it writes the manifest that says so, after which it
is opened, checked and served like any other. Nothing is copied: the file is linked or moved into its folder.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from memopd_env.retrieval.build import versions
from memopd_env.retrieval.corpus import Corpus, file_sha256, fingerprint
from memopd_env.retrieval.encoders import Encoder
from memopd_env.retrieval.errors import BrokenIndexError
from memopd_env.retrieval.files import atomic_file
from memopd_env.retrieval.index import INDEX, load_faiss, read_index
from memopd_env.retrieval.manifest import OFFSETS, CorpusIdentity, Manifest, probe_of


def kind_of(index: Any) -> str:
    """The kind of a FAISS index.

    Raises:
        BrokenIndexError: If it is none of the kinds, or does not rank by inner product.
    """
    faiss = load_faiss()
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise BrokenIndexError("the index does not rank by inner product, as all encoders here need: rebuild it")
    if isinstance(index, faiss.IndexFlat):
        return "flat"
    if isinstance(index, faiss.IndexScalarQuantizer):
        kinds = {faiss.ScalarQuantizer.QT_fp16: "flat-fp16", faiss.ScalarQuantizer.QT_8bit: "sq8"}
        if index.sq.qtype in kinds:
            return kinds[index.sq.qtype]
    for faiss_class, kind in (
        (faiss.IndexIVFPQ, "ivfpq"),
        (faiss.IndexIVFFlat, "ivf"),
        (faiss.IndexHNSW, "hnsw"),
    ):
        if isinstance(index, faiss_class):
            return kind
    raise BrokenIndexError(f"a {type(index).__name__} is none of the kinds of index that are served here: rebuild it")


def adopt(
    index_path: str | Path, corpus_path: str | Path, out: str | Path, *, encoder: Encoder | str, move: bool = False
) -> Manifest:
    """Make an index folder around a FAISS file.

    Args:
        index_path: The FAISS file; row n is line n+1 of the corpus.
        corpus_path: The corpus, ``.jsonl`` or ``.jsonl.gz``.
        out: The folder to make.
        encoder: The encoder that made the vectors. Given by name only it cannot be checked: then a wrong one is noticed
            only by its size.
        move: Move the file instead of linking it.

    Raises:
        BrokenIndexError: If the file is not a known kind of index, or has another number of rows than the corpus.
        CorpusError: If the corpus is missing.
    """
    out = Path(out)
    if (out / "manifest.json").exists():
        raise BrokenIndexError(f"{out} holds an index already: choose another folder")
    index = read_index(index_path)
    kind = kind_of(index)
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.open(corpus_path, out / OFFSETS)
    if index.ntotal != len(corpus):
        raise BrokenIndexError(
            f"{index_path} holds {index.ntotal:,} vectors and {corpus.path} {len(corpus):,} passages: they do not "
            "belong together"
        )
    path = corpus.path.absolute()
    inside = out.absolute() in path.parents
    manifest = Manifest(
        kind=kind,
        encoder=encoder if isinstance(encoder, str) else encoder.name,
        dim=int(index.d),
        count=int(index.ntotal),
        corpus=CorpusIdentity(
            str(path.relative_to(out.absolute()) if inside else path),
            len(corpus),
            path.stat().st_size,
            fingerprint(path),
            file_sha256(path),
        ),
        search={"nprobe": 64} if kind in ("ivf", "ivfpq") else {"efSearch": 128} if kind == "hnsw" else {},
        probe=[] if isinstance(encoder, str) else probe_of(encoder),
        files={},
        versions=versions(),
    )
    if not isinstance(encoder, str):
        manifest.check_encoder(encoder)
    _place(Path(index_path), out / INDEX, move)
    files = {name: (out / name).stat().st_size for name in (INDEX, OFFSETS)}
    manifest = Manifest(**{**manifest.__dict__, "files": files})
    manifest.write(out)
    return manifest


def _place(source: Path, target: Path, move: bool) -> None:
    if move:
        shutil.move(source, target)
        return
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        with atomic_file(target) as partial:
            shutil.copyfile(source, partial)


def verify(folder: str | Path, corpus_path: str | Path | None = None, encoder: Encoder | None = None) -> list[str]:
    """Check an index folder thoroughly: every byte of the corpus, every file, sampled vectors against the encoder.

    Args:
        folder: The index folder.
        corpus_path: The corpus, if it is not where the manifest says.
        encoder: If given, re-encodes sampled passages and looks for them in the index.

    Returns:
        What was checked, one line each.

    Raises:
        RetrievalError: Saying what does not hold.
        CorpusError: If the corpus is missing or malformed.
    """
    from memopd_env.retrieval.dense import open_corpus, open_index

    folder = Path(folder)
    manifest = Manifest.read(folder)
    checked = [f"{len(manifest.files)} files have their sizes"]
    corpus = open_corpus(folder, manifest, corpus_path)
    if file_sha256(corpus.path) != manifest.corpus.sha256:
        raise BrokenIndexError(f"{corpus.path} has other bytes than the corpus that was indexed: restore or rebuild")
    checked.append(f"all {manifest.corpus.bytes:,} bytes of the corpus are those that were indexed")
    passages = sum(1 for _ in corpus)
    checked.append(f"{passages:,} passages are well formed")
    index = open_index(folder, manifest)
    checked.append(f"the index opens and holds {len(index):,} vectors")
    if encoder is not None:
        manifest.check_encoder(encoder)
        rows = np.unique(np.linspace(0, manifest.count - 1, 20).astype(int))
        texts = [corpus[manifest.first_row + int(row)].contents for row in rows]
        _, found = index.search(encoder.encode_passages(texts), 3)
        # By text, as a passage may have a twin.
        hits = sum(
            any(corpus[manifest.first_row + int(row)].contents == text for row in near if row >= 0)
            for text, near in zip(texts, found, strict=True)
        )
        if hits < 0.8 * len(rows):
            raise BrokenIndexError(
                f"only {hits} of {len(rows)} sampled passages are found by their own vectors: the encoder, or the "
                "order of the corpus, is not the one that the index was built with"
            )
        checked.append(f"{hits} of {len(rows)} sampled passages are found by their own vectors")
    return checked
