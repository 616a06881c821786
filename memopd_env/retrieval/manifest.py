"""What an index folder says about itself.

``manifest.json`` is written last, so a folder that has one is whole. It names the corpus, the encoder and every file
with its size, and holds what the encoder made of a fixed sentence: so a cut file, another corpus, or another model
under the same name is refused when the index is opened, and not found out from bad scores.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from memopd_env.retrieval.corpus import fingerprint
from memopd_env.retrieval.encoders import Encoder
from memopd_env.retrieval.errors import BrokenIndexError
from memopd_env.retrieval.files import write_json

FORMAT = 1
MANIFEST = "manifest.json"
OFFSETS = "offsets.npy"
PROBE = "The Who are an English rock band formed in London in 1964."
_PROBE_NUMBERS = 16
_PROBE_TOLERANCE = 0.02


@dataclass(frozen=True)
class CorpusIdentity:
    """Which corpus an index was built over.

    Attributes:
        path: Where it was; absolute, or relative to the index folder if it lies inside.
        passages: Number of lines of the whole file.
        bytes: Size of the file.
        fingerprint: Sampled hash, checked at each load.
        sha256: Hash of the whole file, checked by ``memopd retriever verify``.
    """

    path: str
    passages: int
    bytes: int
    fingerprint: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``.

    Attributes:
        kind: The kind of index.
        encoder: The encoder's name.
        dim: Numbers in a vector.
        count: Vectors in the index.
        corpus: The corpus.
        first_row: Row of the corpus that the first vector belongs to; not 0 for a shard.
        search: Settings of the search, e.g. ``nprobe``.
        probe: First numbers of the vector that the encoder gave a fixed sentence; empty if unknown.
        files: Size in bytes of every other file of the folder.
        recall: What was measured when it was built: ``k``, ``queries``, ``value``, and the settings tried.
        versions: Versions of the software that built it.
        format: Version of this layout.
    """

    kind: str
    encoder: str
    dim: int
    count: int
    corpus: CorpusIdentity
    first_row: int = 0
    search: dict[str, int] = field(default_factory=dict)
    probe: list[float] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    recall: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it into a folder, whole or not at all."""
        write_json(folder / MANIFEST, asdict(self))

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read the manifest of an index folder and check that its files are whole.

        Raises:
            BrokenIndexError: If there is none, it is malformed, or a file is missing or has another size.
        """
        folder = Path(folder)
        path = folder / MANIFEST
        if not path.is_file():
            hint = (
                "an unfinished build: run the same build command again, it resumes"
                if is_staging(folder)
                else ("build one with `memopd retriever build --corpus FILE --out DIR`")
            )
            raise BrokenIndexError(f"{folder} holds no index ({MANIFEST} is missing): {hint}")
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            known = {each.name for each in fields(cls)}
            if record["format"] != FORMAT:
                raise BrokenIndexError(f"{path} has format {record['format']}, this version reads {FORMAT}: rebuild it")
            corpus = CorpusIdentity(**record.pop("corpus"))
            manifest = cls(corpus=corpus, **{name: value for name, value in record.items() if name in known})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenIndexError(f"{path} is malformed ({error!r}): rebuild the index") from error
        for name, size in manifest.files.items():
            file = folder / name
            if Path(name).name != name or not file.is_file():
                raise BrokenIndexError(f"{file} is missing: copy the folder again or rebuild it")
            if file.stat().st_size != size:
                raise BrokenIndexError(
                    f"{file} has {file.stat().st_size:,} bytes and should have {size:,}: it was cut off or changed; "
                    "copy the folder again or rebuild it"
                )
        return manifest

    def corpus_path(self, folder: str | Path) -> Path:
        """Where the corpus was when the index was built."""
        return Path(folder) / self.corpus.path

    def check_corpus(self, path: Path, rows: int) -> None:
        """Refuse a corpus other than the one that was indexed.

        Raises:
            BrokenIndexError: Saying what differs.
        """
        if rows != self.corpus.passages:
            raise BrokenIndexError(
                f"the index was built over a corpus of {self.corpus.passages:,} passages and {path} has {rows:,}: give "
                "the corpus it was built from, or rebuild the index"
            )
        if fingerprint(path) != self.corpus.fingerprint:
            raise BrokenIndexError(
                f"{path} has as many passages as the corpus that was indexed, but other bytes: vectors and passages "
                "would not belong together; give the original corpus, or rebuild the index"
            )

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse an encoder that gives other vectors than the one that built the index.

        Raises:
            BrokenIndexError: Saying what differs.
        """
        if encoder.dim != self.dim:
            raise BrokenIndexError(
                f"encoder {encoder.name!r} gives vectors of {encoder.dim} numbers and the index holds {self.dim} "
                f"(built with {self.encoder!r}): use that encoder, or rebuild the index"
            )
        if self.probe and np.abs(np.array(self.probe) - np.array(probe_of(encoder))).max() > _PROBE_TOLERANCE:
            raise BrokenIndexError(
                f"encoder {encoder.name!r} gives other vectors than {self.encoder!r} gave when the index was built: it "
                "is another model or version; use the original, or rebuild the index"
            )


def probe_of(encoder: Encoder) -> list[float]:
    """First numbers of an encoder's vector of a fixed sentence."""
    vector = encoder.encode_passages([PROBE])[0]
    return [round(float(number), 5) for number in vector[:_PROBE_NUMBERS]]


def is_staging(folder: Path) -> bool:
    """Whether a build of this folder was begun and not finished."""
    return (folder.with_name(f".{folder.name}.building") / "state.json").is_file()
