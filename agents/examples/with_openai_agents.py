"""The OpenAI Agents SDK: the two actions are its function tools, and the first one called ends the turn.

Try it, after ``pip install openai-agents``::

    PYTHONPATH=agents/examples memopd eval --agent with_openai_agents:SDKAgent --agent-arg model=NAME \
        --agent-arg base_url=http://127.0.0.1:8000/v1 --out runs/sdk
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled


@function_tool
def search(memory: str, query: str) -> str:
    """Search the passages. Memory is everything found out so far; nothing else is remembered."""
    return f"<think>{memory}</think><search>{query}</search>"


@function_tool
def answer(memory: str, answers: list[str]) -> str:
    """Answer all questions, in their order; this ends the task."""
    return f"<think>{memory}</think><answer>{'; '.join(answers)}</answer>"


class SDKAgent:
    """One run of an SDK agent a turn."""

    def __init__(self, model: str, base_url: str | None = None, api_key: str = "none") -> None:
        set_tracing_disabled(True)
        self._loop = asyncio.new_event_loop()  # the client lives on one loop, whichever thread plays
        self._agent = Agent(
            name="player",
            instructions="Play the next turn by calling search or answer.",
            tools=[search, answer],
            tool_use_behavior="stop_on_first_tool",
            model=OpenAIChatCompletionsModel(model, AsyncOpenAI(base_url=base_url, api_key=api_key)),
            model_settings=ModelSettings(temperature=0, tool_choice="required"),
        )

    def reset(self, seed: int | None = None) -> None:
        """Nothing is remembered between episodes."""

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Run the SDK agent on the context."""
        context = "".join(segment.text for segment in info["context"])
        return str(self._loop.run_until_complete(Runner.run(self._agent, context)).final_output)
