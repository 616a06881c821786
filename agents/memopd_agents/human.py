"""A person as an agent: it reads the context on the terminal, writes its memory, and searches or answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from memopd_env.protocol import Tags


class HumanAgent:
    """Asks the person at the terminal; the protocol's tags are written for them.

    Args:
        tags: Tag names.
        console: Where to ask; default: standard output.
    """

    def __init__(self, tags: Tags | None = None, console: Console | None = None) -> None:
        self._tags = tags or Tags()
        self._console = console or Console()

    def reset(self, seed: int | None = None) -> None:
        """Do nothing: a person remembers what they like."""

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Ask for memory, then for a query or the answers.

        Raises:
            KeyboardInterrupt: If input ends.
        """
        think, search, answer = self._tags.think, self._tags.search, self._tags.answer
        memory = self._ask("What do you want to remember?")
        kind = ""
        while kind not in ("s", "a"):
            kind = self._ask(f"{search} or {answer}? (s/a)").strip().lower()[:1]
        tag = search if kind == "s" else answer
        content = self._ask("Query" if kind == "s" else "Answers, separated by ;")
        return f"<{think}>{memory}</{think}><{tag}>{content}</{tag}>"

    def _ask(self, question: str) -> str:
        try:
            return self._console.input(f"[bold]{question}[/bold] ")
        except EOFError:
            raise KeyboardInterrupt from None
