"""Show Sphinx roles in docstrings as plain code: ``:class:`~a.b.C` `` becomes ```C```."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`(?:~(?:\w+\.)*)?([\w.]+)`")


class PlainRoles(griffe.Extension):
    """Rewrites the docstring of every object that has one."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            obj.docstring.value = ROLE.sub(lambda role: f"`{role[1]}`", obj.docstring.value)
