"""Write the tables of training options into the pages, from the dataclasses that define them.

A line ``<!-- options: memopd -->`` becomes the table of ``MemOPDConfig``, ``<!-- options: sft -->`` that of
``MemOPDSFTConfig``.
"""

from __future__ import annotations

import re
from typing import Any

MARK = re.compile(r"^<!-- options: (\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace every mark of a page."""
    return MARK.sub(lambda mark: options_table(mark[1]), markdown)


def options_table(which: str) -> str:
    """Return the Markdown table of the options of ``sft`` or ``memopd``."""
    from memopd_train.config import MemOPDConfig, MemOPDSFTConfig, own_options

    kind = {"sft": MemOPDSFTConfig, "memopd": MemOPDConfig}[which]
    rows = [f"| `{name}` | `{default}` | {_cell(meaning)} |" for name, default, meaning in own_options(kind)]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
