"""What can go wrong while learning, as types. Every message names the thing and the way out."""

from __future__ import annotations

from memopd_env.errors import MemOPDError


class EpisodeError(MemOPDError, ValueError):
    """An episode, or a file of episodes, cannot be learned from; the message names file, episode, call and cure."""


class CallTooLongError(EpisodeError):
    """A call is longer than the model's window. Nothing is ever truncated silently."""


class VocabularyError(MemOPDError, ValueError):
    """Student, teacher or data do not agree on what a token id means."""


class CheckpointError(MemOPDError, RuntimeError):
    """A run cannot be continued, or would overwrite another one."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM arrived; the state was saved first and the message says how to continue."""
