"""An OpenAI-compatible chat endpoint on loopback whose replies are scripted; everything but the model is real."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

Reply = Callable[[dict[str, Any]], dict[str, Any] | JSONResponse]


@dataclass
class ChatServer:
    """``url`` is what a client gets as base_url; ``requests`` are the bodies it was sent."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def chat_server(reply: Reply) -> Iterator[ChatServer]:
    """Serve chat completions; ``reply`` turns a request into the assistant's message, or into a whole response."""
    app = FastAPI()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    state = ChatServer("")

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> JSONResponse:
        body = await request.json()
        state.requests.append(body)
        state.headers.append(dict(request.headers))
        message = reply(body)
        return message if isinstance(message, JSONResponse) else JSONResponse(completion(body, message))

    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server died"
        time.sleep(0.01)
    state.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join(10)


def completion(body: dict[str, Any], message: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A whole response around a message."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": None, **message},
                "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": len(transcript(body)) // 4, "completion_tokens": 7, "total_tokens": 0},
        **changes,
    }


def text(content: str) -> dict[str, Any]:
    return {"content": content}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


def transcript(body: dict[str, Any]) -> str:
    """All text of a request's messages."""
    parts = []
    for message in body["messages"]:
        content = message.get("content") or ""
        parts += [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return "\n".join(parts)


def next_move(body: dict[str, Any]) -> tuple[str, str, list[str]]:
    """What a sensible player of the test tasks does next: (memory, query or "", answers).

    It knows nothing: it reads in the request which two people are asked for, and where they were born if a passage or
    its own memory says so.
    """
    seen = transcript(body)
    people = list(dict.fromkeys(re.findall(r"Where was (\w+) born\?", seen)))
    known = dict(re.findall(r"(\w+) was born in (\w+)", seen))
    memory = "; ".join(f"{person} was born in {known[person]}" for person in people if person in known)
    missing = [person for person in people if person not in known]
    return memory, missing[0] if missing else "", [known.get(person, "?") for person in people]
