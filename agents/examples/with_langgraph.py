"""LangGraph: a turn is one pass through a graph, from context to tool call to action text.

Try it, after ``pip install langgraph langchain-openai``::

    PYTHONPATH=agents/examples memopd eval --agent with_langgraph:GraphAgent --agent-arg model=NAME \
        --agent-arg base_url=http://127.0.0.1:8000/v1 --out runs/graph
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from pydantic import SecretStr


def search(memory: str, query: str) -> str:
    """Search the passages. Memory is everything found out so far; nothing else is remembered."""
    return f"<think>{memory}</think><search>{query}</search>"


def answer(memory: str, answers: list[str]) -> str:
    """Answer all questions, in their order; this ends the task."""
    return f"<think>{memory}</think><answer>{'; '.join(answers)}</answer>"


class Turn(TypedDict):
    """What flows through the graph."""

    context: str
    reply: Any
    action: str


class GraphAgent:
    """One pass through the graph a turn."""

    def __init__(self, model: str, base_url: str | None = None, api_key: str = "none") -> None:
        chat = ChatOpenAI(model=model, base_url=base_url, api_key=SecretStr(api_key), temperature=0)
        player = chat.bind_tools([search, answer], tool_choice="required")

        def think(state: Turn) -> dict[str, Any]:
            return {"reply": player.invoke(state["context"])}

        def write(state: Turn) -> dict[str, Any]:
            call = state["reply"].tool_calls[0]
            return {"action": (search if call["name"] == "search" else answer)(**call["args"])}

        self._graph = StateGraph(Turn).add_sequence([think, write]).add_edge(START, "think").compile()

    def reset(self, seed: int | None = None) -> None:
        """Nothing is remembered between episodes."""

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Send the context through the graph."""
        turn = Turn(context="".join(segment.text for segment in info["context"]), reply=None, action="")
        return self._graph.invoke(turn)["action"]
