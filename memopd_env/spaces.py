"""A space of text as language models write it.

``gymnasium.spaces.Text`` knows a fixed alphabet and a fixed length, which no model keeps to. ``UnicodeText`` contains
every Python string: any script, any length, empty, with NUL or lone surrogates.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym

# Samples mix plain letters with protocol punctuation, accents, right-to-left and wide characters.
_SAMPLED = "abcdefghijklmnopqrstuvwxyz ABC 0123456789 .,;<>/[]\n éßñ עברית 中文 ё 🙂"


class UnicodeText(gym.Space[str]):
    """All strings.

    Args:
        max_sample_length: Most characters of a sampled string; membership is not bounded.
        seed: Seed of :meth:`sample`.
    """

    def __init__(self, max_sample_length: int = 64, seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)
        self.max_sample_length = max_sample_length

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed-size array form."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return a random string; masks do not apply to text."""
        if mask is not None or probability is not None:
            raise ValueError(
                "UnicodeText has no finite alphabet, so it can not be sampled with a mask or probabilities"
            )
        length = int(self.np_random.integers(0, self.max_sample_length + 1))
        return "".join(_SAMPLED[i] for i in self.np_random.integers(0, len(_SAMPLED), size=length))

    def contains(self, x: Any) -> bool:
        """Tell whether ``x`` is a string."""
        return isinstance(x, str)

    def __repr__(self) -> str:
        return "UnicodeText()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText)

    # Like gymnasium's own spaces: equal by value and unhashable.
    __hash__ = None  # type: ignore[assignment]


class ChatMessages(gym.Space[list[dict[str, str]]]):
    """Lists of chat messages, ``{"role": "user" | "assistant" | "system", "content": str}``."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Messages have no fixed-size array form."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> list[dict[str, str]]:
        """Return one to three messages of random letters, beginning with the user's."""
        if mask is not None or probability is not None:
            raise ValueError("ChatMessages can not be sampled with a mask or probabilities")
        text = UnicodeText(seed=int(self.np_random.integers(2**31)))
        roles = ("user", "assistant", "user")[: int(self.np_random.integers(1, 4))]
        return [{"role": role, "content": text.sample()} for role in roles]

    def contains(self, x: Any) -> bool:
        """Tell whether ``x`` is a list of messages."""
        return isinstance(x, list) and all(
            isinstance(message, dict)
            and message.get("role") in ("user", "assistant", "system")
            and isinstance(message.get("content"), str)
            for message in x
        )

    def __repr__(self) -> str:
        return "ChatMessages()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatMessages)

    __hash__ = None  # type: ignore[assignment]
