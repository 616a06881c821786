"""From a corpus to an index folder, in memory that does not grow with the corpus.

Three stages, all in a hidden folder beside the target. Encoding appends vectors to a file and notes after each block
how far it came; it is the stage that takes hours, so a killed build goes on at the last block. Indexing trains on a
sample and adds the vectors block by block. Measuring compares the finished index with exact search on sampled queries
and sets its search effort to the least that reaches the wanted recall. The manifest is written last and the folder is
renamed into place: there is never half an index.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from memopd_env.errors import CorpusError
from memopd_env.retrieval.corpus import Corpus, file_sha256, fingerprint
from memopd_env.retrieval.encoders import Encoder, checked
from memopd_env.retrieval.errors import BrokenIndexError, EncoderError, NotEnoughDiskError
from memopd_env.retrieval.files import sync, write_json
from memopd_env.retrieval.index import INDEX, LISTS, REFINE
from memopd_env.retrieval.indexing import write_vectors
from memopd_env.retrieval.kinds import check_count, check_kind, estimate
from memopd_env.retrieval.manifest import OFFSETS, CorpusIdentity, Manifest, probe_of
from memopd_env.retrieval.recall import sample_queries, tune
from memopd_env.retrieval.resources import check_disk

Progress = Callable[[str, int, int], None]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class _Plan:
    """What decides whether an interrupted build may be continued."""

    corpus: str
    encoder: str
    probe: list[float]
    dtype: str
    start: int
    stop: int


def build(
    corpus_path: str | Path,
    out: str | Path,
    *,
    encoder: Encoder,
    kind: str = "flat",
    rows: tuple[int, int] | None = None,
    block: int = 2048,
    overwrite: bool = False,
    recall_queries: int = 100,
    wanted_recall: float = 0.95,
    progress: Progress | None = None,
) -> Manifest:
    """Build an index folder, or continue building it.

    Args:
        corpus_path: ``.jsonl`` or ``.jsonl.gz``.
        out: The folder to make.
        encoder: Makes the vectors.
        kind: The kind of index (:mod:`memopd_env.retrieval.kinds`).
        rows: First row and the row after the last, for a shard; by default all.
        block: Passages encoded between two notes of progress.
        overwrite: Replace an index that is already there.
        recall_queries: Queries on which recall is measured; 0 for no measurement.
        wanted_recall: Recall@3 that the search effort is set to reach where it can.
        progress: Called with the stage, how much is done, and how much there is.

    Returns:
        The manifest of the finished folder.

    Raises:
        CorpusError: If the corpus is missing or a line is malformed; the message names the line.
        EncoderError: If the encoder fails; the message names the lines.
        BrokenIndexError: If ``out`` exists and ``overwrite`` is not set, or another build is in the way.
        NotEnoughDiskError: If the disk is too small or fills up; the build can be continued.
    """
    out = Path(out).absolute()
    check_kind(kind)
    if out.exists() and not overwrite:
        raise BrokenIndexError(f"{out} exists already: choose another folder, or replace it with --overwrite")
    tell = progress or (lambda stage, done, total: None)
    staging = out.with_name(f".{out.name}.building")
    staging.mkdir(parents=True, exist_ok=True)
    with _locked(staging), _nothing_left(staging), _disk_errors(out):
        corpus = Corpus.open(corpus_path, staging / OFFSETS)
        start, stop = rows or (0, len(corpus))
        if not 0 <= start < stop <= len(corpus):
            raise CorpusError(f"rows {start}:{stop} of {corpus.path}, which has {len(corpus)}: nothing to index")
        check_count(kind, stop - start)
        dtype = "float32" if kind == "flat" else "float16"
        plan = _Plan(fingerprint(corpus.path), encoder.name, probe_of(encoder), dtype, start, stop)
        vectors = _encode(corpus, encoder, plan, staging, kind, block, tell)
        write_vectors(vectors, staging, kind, tell)
        recall, search = {}, {}
        if recall_queries:
            queries = sample_queries(corpus, start, stop, recall_queries)
            recall, search = tune(
                staging, vectors, checked(encoder.encode_queries(queries), queries, encoder), kind, wanted_recall, tell
            )
        tell("hash", 0, 1)
        manifest = Manifest(
            kind=kind,
            encoder=encoder.name,
            dim=encoder.dim,
            count=stop - start,
            first_row=start,
            corpus=_identity(corpus, plan.corpus, out),
            search=search,
            probe=plan.probe,
            files={name: (staging / name).stat().st_size for name in _files(staging)},
            recall=recall,
            versions=versions(),
        )
        manifest.write(staging)
        del vectors
        for name in ("vectors.bin", "state.json", "lock"):
            (staging / name).unlink(missing_ok=True)
        _move_into_place(staging, out)
        tell("hash", 1, 1)
    return manifest


def _files(folder: Path) -> list[str]:
    kept = {INDEX, REFINE, LISTS, OFFSETS}
    return sorted(path.name for path in folder.iterdir() if path.name in kept)


def _encode(
    corpus: Corpus, encoder: Encoder, plan: _Plan, staging: Path, kind: str, block: int, tell: Progress
) -> np.ndarray:
    """Bring ``vectors.bin`` to its full length and map it, (rows, dim)."""
    path, state_path = staging / "vectors.bin", staging / "state.json"
    count, dtype = plan.stop - plan.start, np.dtype(plan.dtype)
    row_bytes = encoder.dim * dtype.itemsize
    done = _resume(state_path, plan)
    done = min(done, path.stat().st_size // row_bytes if path.is_file() else 0)
    need = estimate(kind, encoder.dim, count).build_disk - done * row_bytes
    check_disk(staging, need, f"building {count:,} vectors of {encoder.dim} numbers")
    tell("encode", done, count)
    with open(path, "ab") as file:
        # Whatever came after the last note may be half a block.
        file.truncate(done * row_bytes)
        passages = corpus.stream(plan.start + done, plan.stop)
        while done < count:
            texts = [next(passages).contents for _ in range(min(block, count - done))]
            first = plan.start + done + 1
            try:
                vectors = checked(encoder.encode_passages(texts), texts, encoder)
            except EncoderError as error:
                raise EncoderError(f"{corpus.path}, lines {first} to {first + len(texts) - 1}: {error}") from error
            file.write(np.ascontiguousarray(vectors, dtype).data)
            file.flush()
            os.fsync(file.fileno())
            done += len(texts)
            write_json(state_path, {"plan": asdict(plan), "done": done})
            tell("encode", done, count)
    return np.memmap(path, dtype, "r", shape=(count, encoder.dim))


def _resume(state_path: Path, plan: _Plan) -> int:
    """How many vectors an interrupted build of the same plan has made."""
    if not state_path.is_file():
        write_json(state_path, {"plan": asdict(plan), "done": 0})
        return 0
    state = json.loads(state_path.read_text(encoding="utf-8"))
    differs = [name for name, value in asdict(plan).items() if state["plan"].get(name) != value]
    if differs:
        raise BrokenIndexError(
            f"an unfinished build in {state_path.parent} differs in {', '.join(differs)}: finish it with its own "
            "settings, or delete that folder"
        )
    return int(state["done"])


def _identity(corpus: Corpus, sampled: str, out: Path) -> CorpusIdentity:
    path = corpus.path.absolute()
    inside = out in path.parents
    return CorpusIdentity(
        path=str(path.relative_to(out) if inside else path),
        passages=len(corpus),
        bytes=path.stat().st_size,
        fingerprint=sampled,
        sha256=file_sha256(path),
    )


def versions() -> dict[str, str]:
    """Versions of what makes an index, for its manifest."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("faiss-cpu", "faiss-gpu-cu12", "memopd"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def _move_into_place(staging: Path, out: Path) -> None:
    sync(staging)
    old = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(staging, out)
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _locked(staging: Path) -> Iterator[None]:
    """Keep a second build of the same folder out; the lock goes with the process."""
    with open(staging / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BrokenIndexError(f"another process is building {staging}: wait for it or stop it") from error
        yield


@contextmanager
def _nothing_left(staging: Path) -> Iterator[None]:
    """Remove the hidden folder of a build that failed before it had made anything."""
    try:
        yield
    except BaseException:
        if not (staging / "state.json").is_file():
            shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NotEnoughDiskError(
                f"the disk is full while building {out}: free some space and run the same command again, it goes on "
                "where it stopped"
            ) from error
        raise
    except RuntimeError as error:
        # FAISS reports a short write as text.
        if "fwrite" in str(error) or "write error" in str(error):
            raise NotEnoughDiskError(
                f"the disk is full while writing the index of {out}: free some space and run the same command again"
            ) from error
        raise
