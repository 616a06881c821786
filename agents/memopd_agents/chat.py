"""Any OpenAI-compatible endpoint as an agent: one stateless request a turn, made of what the memory policy kept.

The context becomes chat messages (task and information from the user, past actions from the assistant), so the
endpoint never sees more than the environment's context. With ``tools=True`` search and answer are also offered as
functions; a function call is written back as the tags that stand for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memopd_agents.seeds import derive_seed
from memopd_env.errors import ConfigError, MemOPDError, MissingExtraError
from memopd_env.neutralise import neutralise
from memopd_env.protocol import Tags
from memopd_env.scoring import sayable
from memopd_env.wrappers import context_messages

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessage

MODEL_VARIABLE = "MEMOPD_CHAT_MODEL"


class ChatError(MemOPDError, RuntimeError):
    """An endpoint could not be asked, even after retries; the message names it and the way out."""


class ChatAgent:
    """Plays with a chat model behind an OpenAI-compatible API.

    Args:
        model: Name of the model; default: the environment variable ``MEMOPD_CHAT_MODEL``.
        base_url: Of the endpoint, e.g. ``http://127.0.0.1:8000/v1``; default: ``OPENAI_BASE_URL``, else OpenAI's own.
        api_key: Default: ``OPENAI_API_KEY``; an endpoint of your own may need none.
        tools: Offer search and answer as functions as well as tags.
        tags: Tag names, as in the environment.
        timeout: Seconds a request may take.
        max_retries: Further attempts after 408, 409, 429, 5xx and broken connections, with exponential backoff and
            jitter, or as long as the endpoint asks in ``Retry-After``.
        options: Further fields of the request, which win over ours (``temperature`` 0, ``max_tokens`` 1024, ``stop``,
            ``seed``); None removes a field, e.g. ``{"max_tokens": None, "max_completion_tokens": 4096}``.

    Attributes:
        usage: Token counts of the last call as the endpoint reported them; ``{}`` if it did not.

    Raises:
        ConfigError: If no model or no key is known.
        MissingExtraError: If the ``openai`` package is not installed.
    """

    def __init__(
        self,
        model: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        tools: bool = False,
        tags: Tags | None = None,
        timeout: float = 120.0,
        max_retries: int = 5,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model or os.environ.get(MODEL_VARIABLE, "")
        if not self._model:
            raise ConfigError(f"the chat agent needs a model: model=NAME, or set {MODEL_VARIABLE}")
        self._client = _client(base_url, api_key, timeout, max_retries)
        self._tags = tags or Tags()
        self._tools = _functions() if tools else None
        self._options = {"temperature": 0, "max_tokens": 1024, "stop": list(self._tags.stop_strings), **(options or {})}
        self.reset()

    def reset(self, seed: int | None = None) -> None:
        """Start an episode; requests carry seeds derived from ``seed``, which endpoints may or may not obey."""
        self._seed = seed
        self._turn = 0
        self.usage: dict[str, int] = {}

    def act(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Ask for the next action.

        Raises:
            ChatError: If the endpoint refuses, or does not answer after all retries.
        """
        from openai import APIError

        request: dict[str, Any] = {"model": self._model, "messages": context_messages(info["context"])}
        if self._seed is not None:
            request["seed"] = derive_seed(self._seed, self._turn) >> 32
        request.update(self._options)
        if self._tools:
            think = self._tags.think
            hint = (
                f"Instead of writing tags you can call search or answer; its memory is what you would write in {think}."
            )
            request |= {"tools": self._tools, "messages": [{"role": "system", "content": hint}, *request["messages"]]}
        try:
            reply = self._client.chat.completions.create(**{k: v for k, v in request.items() if v is not None})
        except APIError as error:
            raise ChatError(
                f"{self._client.base_url} failed for model {self._model!r}: {error}; check base_url, model and key, or "
                "raise timeout and max_retries"
            ) from error
        self._turn += 1
        self.usage = {}
        if reply.usage is not None:
            self.usage = {name: getattr(reply.usage, name) for name in ("prompt_tokens", "completion_tokens")}
        if not reply.choices:
            raise ChatError(f"{self._client.base_url} answered without choices for model {self._model!r}")
        choice = reply.choices[0]
        return self._text(choice.message, cut_at_stop=choice.finish_reason == "stop")

    def _text(self, message: ChatCompletionMessage, cut_at_stop: bool) -> str:
        """Write a message as an action."""
        content = message.content or ""
        # Some servers hand a model's thinking over apart from its reply.
        reasoning = getattr(message, "reasoning_content", None) or ""
        for call in message.tool_calls or ():
            if call.type == "function":
                return self._written(call.function.name, call.function.arguments, reasoning + content)
        if reasoning and f"<{self._tags.think}>" not in content:
            content = f"<{self._tags.think}>{neutralise(reasoning, self._tags.names)}</{self._tags.think}>{content}"
        return close_action(content, self._tags) if cut_at_stop else content

    def _written(self, name: str, arguments: str, thought: str) -> str:
        """Write a function call as tags; one that makes no sense is left as it is, for the environment to reject."""
        try:
            given = json.loads(arguments)
            memory = "\n".join(part for part in (thought.strip(), str(given.get("memory", ""))) if part)
            if name == "search":
                tag, content = self._tags.search, str(given["query"])
            else:
                tag, content = self._tags.answer, "; ".join(sayable(str(answer)) for answer in given["answers"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{name}({arguments})"
        think, names = self._tags.think, self._tags.names
        return f"<{think}>{neutralise(memory, names)}</{think}><{tag}>{neutralise(content, names)}</{tag}>"


def close_action(text: str, tags: Tags) -> str:
    """Put back the closing tag that a stop string cut off: of the last search or answer, if it is still open."""
    opened = {name: text.rfind(f"<{name}>") for name in (tags.search, tags.answer)}
    name = max(opened, key=lambda candidate: opened[candidate])
    thinking = text.rfind(f"<{tags.think}>") > text.rfind(f"</{tags.think}>")
    if opened[name] < 0 or thinking or f"</{name}>" in text[opened[name] :]:
        return text
    return f"{text}</{name}>"


def _client(base_url: str | None, api_key: str | None, timeout: float, max_retries: int) -> OpenAI:
    try:
        from openai import OpenAI
    except ModuleNotFoundError as error:
        raise MissingExtraError("openai", "chat") from error
    api_key = api_key or os.environ.get("OPENAI_API_KEY")
    if not api_key:
        if not (base_url or os.environ.get("OPENAI_BASE_URL")):
            raise ConfigError(
                "the chat agent needs a key: set OPENAI_API_KEY, or give base_url=URL of an endpoint without"
            )
        api_key = "none"
    return OpenAI(base_url=base_url, api_key=api_key, timeout=timeout, max_retries=max_retries)


def _functions() -> list[dict[str, Any]]:
    memory = {"type": "string", "description": "What you have found out so far; all that you will remember."}
    query = {"type": "string", "description": "One query about one question."}
    answers = {"type": "array", "items": {"type": "string"}, "description": "One answer per question, in their order."}
    return [
        _function("search", "Search the collection of passages.", {"memory": memory, "query": query}),
        _function("answer", "Answer all questions; this ends the task.", {"memory": memory, "answers": answers}),
    ]


def _function(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
