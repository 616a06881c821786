"""DSPy: a turn is a signature, from the context to memory, action and content; DSPy writes and reads the prompt.

Try it, after ``pip install dspy``::

    PYTHONPATH=agents/examples memopd eval --agent with_dspy:DSPyAgent --agent-arg model=openai/NAME \
        --agent-arg base_url=http://127.0.0.1:8000/v1 --out runs/dspy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import dspy


class PlayTurn(dspy.Signature):
    """Play the next turn of the task in the context."""

    context: str = dspy.InputField()
    memory: str = dspy.OutputField(desc="everything found out so far; nothing else is remembered")
    action: Literal["search", "answer"] = dspy.OutputField()
    content: str = dspy.OutputField(desc="the query, or all answers in order, separated by semicolons")


class DSPyAgent:
    """One prediction a turn."""

    def __init__(self, model: str, base_url: str | None = None, api_key: str = "none") -> None:
        self._model = dspy.LM(model, api_base=base_url, api_key=api_key, temperature=0, cache=False)
        self._play = dspy.Predict(PlayTurn)

    def reset(self, seed: int | None = None) -> None:
        """Nothing is remembered between episodes."""

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Predict the parts of the action from the context."""
        with dspy.context(lm=self._model):
            turn = self._play(context="".join(segment.text for segment in info["context"]))
        return f"<think>{turn.memory}</think><{turn.action}>{turn.content}</{turn.action}>"
