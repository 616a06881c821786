"""The token-exact record of one task played to its end.

A call stores the ids the model was given and the ids it sampled, nothing re-encoded, so the trainer can rebuild the very
state of every sampled token. Two lists of ids are enough to build one by hand; everything else has a default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SegmentSpan:
    """Where one segment of the context lies in a call's prompt.

    Attributes:
        kind: ``task``, ``action`` or ``information``.
        turn: The turn it stems from; -1 for the task.
        start: First position in ``prompt_ids``.
        end: One past the last position.
    """

    kind: str
    turn: int
    start: int
    end: int


@dataclass
class Call:
    """One model invocation: prompt token ids in, action token ids out.

    Attributes:
        prompt_ids: All ids the model saw, in order.
        action_ids: All ids it sampled, including stop strings and EOS.
        logprobs: Natural-log probability of each sampled id under the distribution it was sampled from, or None.
        segments: Origin of every prompt position; empty when built by hand.
        finish_reason: ``stop`` (stop string), ``eos``, ``length`` or ``abort``.
        text: The decoded action, for people; never encoded again.
        seed: Seed of this request.
        policy_version: Optimiser steps the sampling weights had behind them.
    """

    prompt_ids: list[int]
    action_ids: list[int]
    logprobs: list[float] | None = None
    segments: list[SegmentSpan] = field(default_factory=list)
    finish_reason: str = "stop"
    text: str = ""
    seed: int | None = None
    policy_version: int = 0


@dataclass
class Episode:
    """One task played to its end.

    Attributes:
        calls: In the order in which they were sampled.
        reward: Sum of per-question exact matches, 0..N.
        task_id: Which task was played.
        info: The environment's ``info["episode"]`` at the end (answers, em, f1, sub_em, stop reason, ...).
        seed: Episode seed.
    """

    calls: list[Call]
    reward: float
    task_id: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
