"""The documentation is true: its Python runs and prints what it says, its commands parse, its extras exist."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import socket
import tomllib
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer

from memopd_env.cli import GROUP

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = "Output"


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its title, its text, and its first line in the page."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2] or "", match[3], source.count("\n", 0, match.start()) + 2)
        for match in FENCE.finditer(source)
    ]


def commands(page: Path) -> list[str]:
    lines = [
        line.removeprefix("$ ")
        for block in blocks(page)
        if block.language in ("bash", "console")
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    return [line.partition("  #")[0] for line in lines if line.startswith("memopd ")]


def named(pages):
    return [pytest.param(page, id=page.name) for page in pages]


@pytest.fixture
def offline(monkeypatch):
    """Let nothing but this machine be reached."""
    connect = socket.socket.connect

    def connect_here(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"the documentation reaches for {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)


@pytest.mark.parametrize("page", named(page for page in PAGES if any(b.language == "python" for b in blocks(page))))
def test_python_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch, offline):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    page_blocks = blocks(page)
    for block, after in zip(page_blocks, [*page_blocks[1:], None], strict=True):
        if block.language != "python":
            continue
        if block.title:
            Path(block.title).write_text(block.text)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Leading line breaks, so that a traceback names the line of the page.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
        if after is not None and after.title == OUTPUT:
            assert _plain(printed.getvalue()) == _plain(after.text), f"{page.name}:{after.line}"


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", named(page for page in PAGES if commands(page)))
def test_commands_parse(page):
    for line in commands(page):
        _parse(shlex.split(line)[1:])


def test_a_flag_that_does_not_exist_is_found():
    with pytest.raises(Exception, match="No such option: --no-such-flag"):
        _parse(["eval", "--out", "x", "--no-such-flag", "1"])


def _parse(words: list[str]) -> None:
    """Parse a command line as ``memopd`` does, without running it."""
    [entry] = entry_points(group=GROUP, name=words[0])
    app = entry.load()
    if not isinstance(app, typer.Typer):
        function, app = app, typer.Typer(add_completion=False)
        app.command()(function)
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    path = [words[0]]
    while hasattr(command, "commands"):
        path.append(rest.pop(0))
        assert path[-1] in command.commands, f"memopd {' '.join(path)} does not exist"
        command = command.commands[path[-1]]
    context = command.make_context(" ".join(path), list(rest))
    if path[0] == "train":
        _parse_options_of_training(path[1], context.args)


def _parse_options_of_training(which: str, words: list[str]) -> None:
    from memopd_train.config import MemOPDConfig, MemOPDSFTConfig, load_config

    if which in ("sft", "memopd"):
        load_config({"sft": MemOPDSFTConfig, "memopd": MemOPDConfig}[which], [*words, "--report_to", "none"])


@pytest.mark.parametrize("page", named(PAGES))
def test_make_targets_and_extras_exist(page):
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(page):
        for target in re.findall(r"^make (\w+)", block.text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no make {target}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"(?:memopd|\.)\[([\w-]+)\]'", text):
        assert extra in extras, f"there is no extra {extra}"


@pytest.mark.parametrize("page", named([ROOT / "README.md", ROOT / "CONTRIBUTING.md"]))
def test_links_into_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
