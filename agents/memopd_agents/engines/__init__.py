"""Engines turn prompt ids into sampled ids. ``base`` is the contract; ``hf`` runs transformers models on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memopd_agents.engines.base import Completion, Engine, EngineError, PromptTooLongError, Request, SamplingParams

if TYPE_CHECKING:
    from memopd_agents.engines.hf import HFEngine

__all__ = ["Completion", "Engine", "EngineError", "HFEngine", "PromptTooLongError", "Request", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import torch only when an engine that needs it is asked for."""
    if name == "HFEngine":
        from memopd_agents.engines.hf import HFEngine

        return HFEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
