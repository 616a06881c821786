"""What can go wrong, as types. Every message names the thing and the way out."""

from __future__ import annotations


class MemOPDError(Exception):
    """Base of every error this project raises on purpose."""


class TaskError(MemOPDError, ValueError):
    """A task or a task file is malformed; the message names file, line and cure."""


class CorpusError(MemOPDError, ValueError):
    """A corpus file is missing or malformed; the message names file, line and cure."""


class ConfigError(MemOPDError, ValueError):
    """An option, or a combination of options, makes no sense."""


class ActionError(MemOPDError, TypeError):
    """An action is not text."""


class MissingExtraError(MemOPDError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'memopd[{extra}]'")
