"""An engine turns prompt ids into sampled ids, many requests at a time.

Two methods carry the load: ``submit`` never blocks, ``poll`` returns whatever has finished. That is all a rollout
needs to keep every environment busy without waiting for the slowest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from memopd_env.errors import ConfigError, MemOPDError


class PromptTooLongError(MemOPDError, ValueError):
    """A request can never fit the model's window; the message holds both sizes and the cure."""

    def __init__(self, request_id: str, prompt_tokens: int, max_tokens: int, window: int) -> None:
        super().__init__(
            f"request {request_id!r}: a prompt of {prompt_tokens} tokens plus max_tokens={max_tokens} exceeds the "
            f"model's window of {window} tokens; lower max_tokens or top_k, use a memory policy that keeps less, or a "
            "model with a longer window"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.window = window


class EngineError(MemOPDError, RuntimeError):
    """An engine was used in a way it does not support; the message says what to do instead."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        max_tokens: Most ids to sample in one call.
        temperature: 0 is greedy; training uses 1.
        top_p: 1 is off; training uses 1.
        top_k: 0 is off; training uses 0.
        stop: A call ends once its decoded text contains one of these; every sampled id is kept.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that no distribution has.

        Raises:
            ConfigError: Names the value.
        """
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (off) or more")


@dataclass(frozen=True)
class Request:
    """One call to be made. ``request_id`` comes back on its completion."""

    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    request_id: str = ""


@dataclass(frozen=True)
class Completion:
    """One call made. ``logprobs[i]`` is the natural-log probability of ``action_ids[i]`` when it was sampled."""

    request_id: str
    action_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@runtime_checkable
class Engine(Protocol):
    """Where tokens come from."""

    def submit(self, request: Request) -> None:
        """Queue a request; returns at once. Raises PromptTooLongError when it can never fit the model's window."""
        ...

    def poll(self) -> list[Completion]:
        """Advance, then return what finished since the last poll; empty only when nothing is queued or running."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Replace the sampling weights; later completions come from ``version``."""
        ...

    def abort(self) -> None:
        """Drop everything that is queued or running; nothing of it is ever returned."""
        ...

    def close(self) -> None:
        """Release memory; idempotent."""
        ...
