"""A corpus on disk: one JSON object per line, and the number of a line is the number of its vector.

Wikipedia does not fit in memory twice, so a corpus is never loaded. A file of byte offsets (one per line) is made
once, both files are memory-mapped, and a passage is parsed when it is asked for. Compressed corpora cannot be
addressed by row, so they are unpacked once, beside the original.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from memopd_env.errors import CorpusError
from memopd_env.retrieval.base import Passage
from memopd_env.retrieval.files import atomic_file

_BLOCK = 1 << 24
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def parse_line(line: bytes, path: str | Path, number: int) -> Passage:
    """Read one line of a corpus.

    Args:
        line: The raw line; ``{"id", "contents"}``, or ``{"id", "title", "text"}``.
        path: The file, for messages.
        number: The number of the line, from 1, for messages.

    Raises:
        CorpusError: If it is not such an object; the message names file, line and reason.
    """

    def bad(reason: str) -> CorpusError:
        return CorpusError(f'{path}, line {number}: {reason}; expected {{"id": "…", "contents": "\\"Title\\"\\ntext"}}')

    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise bad(f"not UTF-8 (byte {error.start} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise bad("blank line" if not line.strip() else f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise bad(f"a JSON {type(record).__name__}, not an object")
    id, contents = record.get("id"), record.get("contents")
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise bad('"id" is missing or not a string')
    if isinstance(contents, str):
        return Passage.from_contents(str(id), contents)
    title, text = record.get("title"), record.get("text")
    if contents is None and isinstance(title, str) and isinstance(text, str):
        return Passage(str(id), title, text)
    raise bad('"contents" is missing or not a string')


def write_corpus(path: str | Path, passages: Iterable[Passage]) -> int:
    """Write passages as JSONL (gzip if the name ends in ``.gz``), whole or not at all; returns how many."""
    count = 0
    with atomic_file(path) as partial:
        compressed = str(path).endswith(".gz")
        with gzip.open(partial, "wb") if compressed else open(partial, "wb") as file:
            for passage in passages:
                line = json.dumps({"id": passage.id, "contents": passage.contents})
                file.write(line.encode() + b"\n")
                count += 1
    return count


def line_offsets(path: str | Path) -> np.ndarray:
    """Start of each line of a file, and its end: uint64, one longer than the number of lines.

    Blank lines at the very end are not counted, blank lines before it are (and are an error once parsed).
    """
    starts = [np.zeros(1, np.uint64)]
    size = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            starts.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10).astype(np.uint64) + np.uint64(size + 1))
            size += len(block)
        offsets = np.concatenate(starts)
        if offsets[-1] != size:
            offsets = np.append(offsets, np.uint64(size))
        while len(offsets) > 1:
            file.seek(int(offsets[-2]))
            if file.read(int(offsets[-1] - offsets[-2])).strip():
                break
            offsets = offsets[:-1]
    return offsets


def fingerprint(path: str | Path) -> str:
    """A hash of a file's size and of 64 samples of it: milliseconds for any size, so that each load can check it.

    It notices a wrong, cut or regenerated file. An edit that keeps the size and falls between the samples needs
    :func:`file_sha256`, which ``memopd retriever verify`` compares.
    """
    size = os.stat(path).st_size
    digest = hashlib.sha256(f"memopd corpus {size}\n".encode())
    last = max(0, size - _SAMPLE_BYTES)
    with open(path, "rb") as file:
        for position in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
            file.seek(position)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a whole file, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Corpus(Sequence[Passage]):
    """The passages of a corpus file by row, memory-mapped; safe to read from several threads.

    Args:
        path: The uncompressed JSONL file.
        offsets: Start of each line and the end of the last, uint64 (rows + 1).
    """

    def __init__(self, path: str | Path, offsets: np.ndarray) -> None:
        self.path = Path(path)
        self._offsets = offsets
        with open(self.path, "rb") as file:
            # An empty file cannot be mapped.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(offsets) > 1 else None
        if self._map is not None and hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)

    @classmethod
    def open(cls, path: str | Path, offsets_path: str | Path | None = None) -> Corpus:
        """Open a corpus; the offsets are made if they are missing or older than the file.

        Args:
            path: ``.jsonl``, or ``.jsonl.gz`` which is unpacked once beside it.
            offsets_path: Where the offsets are kept; by default beside the corpus, and only in memory if that folder
                cannot be written.

        Raises:
            CorpusError: If the file is missing or not readable, or cannot be unpacked.
        """
        path = Path(path)
        if not path.is_file():
            raise CorpusError(
                f"no corpus at {path}: build one with `memopd world build`, or fetch the published one with "
                "`memopd retriever download`"
            )
        if path.suffix == ".gz":
            path = _unpacked(path)
        sidecar = Path(offsets_path) if offsets_path is not None else path.with_name(path.name + ".offsets.npy")
        return cls(path, _load_offsets(path, sidecar))

    @classmethod
    def with_offsets(cls, path: str | Path, offsets_path: str | Path) -> Corpus:
        """Open a corpus whose offsets are known to belong to it; nothing is scanned or written.

        Raises:
            CorpusError: If the offsets are not readable or point past the end of the file.
        """
        try:
            offsets = np.load(offsets_path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise CorpusError(f"{offsets_path} is not a readable offsets file ({error}): rebuild the index") from error
        if offsets.dtype != np.uint64 or offsets.ndim != 1 or not len(offsets):
            raise CorpusError(f"{offsets_path} is not an offsets file: rebuild the index")
        if int(offsets[-1]) > os.stat(path).st_size:
            raise CorpusError(f"{path} is shorter than when it was indexed: it was cut off or changed; copy it again")
        return cls(path, offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self) or self._map is None:
            raise IndexError(f"row {index} of a corpus of {len(self)} passages")
        return parse_line(self._map[int(self._offsets[row]) : int(self._offsets[row + 1])], self.path, row + 1)

    def __iter__(self) -> Iterator[Passage]:
        """All passages in order."""
        return self.stream(0, len(self))

    def stream(self, start: int, stop: int) -> Iterator[Passage]:
        """Passages of a range of rows in order, read as a stream so that no page of the map stays resident."""
        with open(self.path, "rb") as file:
            file.seek(int(self._offsets[start]))
            for row in range(start, stop):
                yield parse_line(file.readline(), self.path, row + 1)


def _load_offsets(path: Path, sidecar: Path) -> np.ndarray:
    stat = path.stat()
    if sidecar.is_file() and sidecar.stat().st_mtime_ns >= stat.st_mtime_ns:
        try:
            offsets = np.load(sidecar, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError):
            offsets = np.zeros(0)
        if offsets.dtype == np.uint64 and offsets.ndim == 1 and len(offsets) and int(offsets[-1]) <= stat.st_size:
            return offsets
    offsets = line_offsets(path)
    if os.access(sidecar.parent, os.W_OK):
        with atomic_file(sidecar) as partial, open(partial, "wb") as file:
            np.save(file, offsets)
        return np.load(sidecar, mmap_mode="r", allow_pickle=False)
    return offsets


def _unpacked(path: Path) -> Path:
    plain = path.with_suffix("")
    if plain.is_file() and plain.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        return plain
    try:
        with atomic_file(plain) as partial, gzip.open(path, "rb") as packed, open(partial, "wb") as file:
            shutil.copyfileobj(packed, file, _BLOCK)
    except (gzip.BadGzipFile, EOFError) as error:
        raise CorpusError(f"{path} is not a whole gzip file ({error}): download it again") from error
    except OSError as error:
        raise CorpusError(
            f"cannot unpack {path} beside itself ({error}): unpack it where there is room and give the .jsonl"
        ) from error
    return plain
