"""A plain function as an agent: one HTTP request a turn, no framework.

Try it::

    PYTHONPATH=agents/examples OPENAI_BASE_URL=http://127.0.0.1:8000/v1 MEMOPD_CHAT_MODEL=NAME \
        memopd eval --agent bare_callable:act --out runs/bare
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import httpx


def act(observation: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """Show the model what the memory policy kept, and return what it writes."""
    prompt = observation["task"] + observation["memory"] + observation["information"]
    reply = httpx.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"},
        json={
            "model": os.environ["MEMOPD_CHAT_MODEL"],
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
        },
        timeout=120,
    )
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]
