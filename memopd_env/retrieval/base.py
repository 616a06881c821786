"""What a retriever is: queries in, ranked passages out.

One method, batched by nature, because every backend is faster on many queries at once. A failure is a typed error,
never text in a passage and never an empty result.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from memopd_env.errors import MemOPDError


class RetrievalError(MemOPDError, RuntimeError):
    """A search could not be answered (unreachable, time-out, malformed reply, broken index)."""


@dataclass(frozen=True)
class Passage:
    """One retrieved passage.

    Attributes:
        id: The corpus id.
        title: Title without quotes; empty if the corpus has none.
        text: Body without the title line.
        score: Higher is better; comparable only within one query of one retriever.
    """

    id: str
    title: str
    text: str
    score: float = 0.0

    @property
    def contents(self) -> str:
        """The field's one-string form: ``"Title"`` in double quotes, newline, text."""
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def from_contents(cls, id: str, contents: str, score: float = 0.0) -> Passage:
        """Split the field's one-string form; contents without a title line have an empty title."""
        head, newline, body = contents.partition("\n")
        if not newline:
            return cls(id, "", contents, score)
        return cls(id, head.strip().strip('"'), body, score)


@runtime_checkable
class Retriever(Protocol):
    """Anything that answers queries with passages. Must be safe to call from several threads."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query up to ``k`` passages, best first; raises RetrievalError when it cannot."""
        ...


def search(retriever: Retriever, queries: Sequence[str], k: int) -> list[list[Passage]]:
    """Ask a retriever, and check that its answer has the promised shape: anybody may write one.

    Raises:
        RetrievalError: If it has not; whatever the retriever itself raises goes through.
    """
    found: Any = retriever.search(queries, k)
    try:
        fits = len(found) == len(queries) and all(isinstance(one, Passage) for passages in found for one in passages)
    except TypeError:
        fits = False
    if not fits:
        raise RetrievalError(
            f"{type(retriever).__name__}.search returned {reprlib.repr(found)} for {len(queries)} queries; it must "
            "return a list of Passage objects for each (memopd_env.testing.check_retriever checks a retriever)"
        )
    return found
