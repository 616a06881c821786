"""smolagents: the two actions are tools of a ToolCallingAgent, and the first one called ends the turn.

Try it, after ``pip install smolagents openai``::

    PYTHONPATH=agents/examples memopd eval --agent with_smolagents:SmolAgent --agent-arg model=NAME \
        --agent-arg base_url=http://127.0.0.1:8000/v1 --out runs/smol
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smolagents import AgentError, LogLevel, OpenAIServerModel, ToolCallingAgent, tool


class SmolAgent:
    """One run of a ToolCallingAgent a turn; its tools end the run."""

    def __init__(self, model: str, base_url: str | None = None, api_key: str = "none") -> None:
        self._action = ""
        endpoint = OpenAIServerModel(model, base_url, api_key, temperature=0)

        @tool
        def search(memory: str, query: str) -> None:
            """Search the passages.

            Args:
                memory: Everything found out so far; nothing else is remembered.
                query: One query about one question.
            """
            self._action = f"<think>{memory}</think><search>{query}</search>"
            self._agent.interrupt()

        @tool
        def answer(memory: str, answers: str) -> None:
            """Answer all questions; this ends the task.

            Args:
                memory: Everything found out so far.
                answers: The answers in the order of the questions, separated by semicolons.
            """
            self._action = f"<think>{memory}</think><answer>{answers}</answer>"
            self._agent.interrupt()

        self._agent = ToolCallingAgent([search, answer], endpoint, verbosity_level=LogLevel.OFF)

    def reset(self, seed: int | None = None) -> None:
        """Nothing is remembered between episodes."""

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Run the agent on the context until it calls one of the tools."""
        self._action = ""
        try:
            self._agent.run("".join(segment.text for segment in info["context"]))
        except AgentError:  # interrupted by a tool, or a failure
            if not self._action:
                raise
        return self._action
