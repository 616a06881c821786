"""The protocol between agent and environment: how an action is read and how every text around it is written.

An agent thinks in ``<think>…</think>`` and acts with ``<search>…</search>`` or ``<answer>a1; a2</answer>``; the
environment replies with ``<information>…</information>``. Reading is one pass over the action and never fails: whatever
a model wrote is a search, an answer, or invalid with a reason. Writing goes through :class:`Renderer`, the only place
where the text of a passage or a question meets a tag, so it is the only place that has to neutralise it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property, partial
from string import Formatter
from typing import NamedTuple

from memopd_env.errors import ConfigError
from memopd_env.neutralise import neutralise
from memopd_env.retrieval.base import Passage
from memopd_env.tasks.task import Task


@dataclass(frozen=True)
class Tags:
    """Names of the four tags, for models that have their own, e.g. ``Tags(think="thought")``.

    Raises:
        ConfigError: If two names are equal, or one is empty or holds white space, a slash or an angle bracket.
    """

    think: str = "think"
    search: str = "search"
    answer: str = "answer"
    information: str = "information"

    def __post_init__(self) -> None:
        for name in self.names:
            if not re.fullmatch(r"[^\s<>/]+", name):
                raise ConfigError(f"tag name {name!r}: use letters, digits and the like, no space, slash or bracket")
        if len({name.casefold() for name in self.names}) < len(self.names):
            raise ConfigError(f"tag names {', '.join(self.names)}: all four must differ")

    @property
    def names(self) -> tuple[str, str, str, str]:
        """The four names: think, search, answer, information."""
        return (self.think, self.search, self.answer, self.information)

    @property
    def stop_strings(self) -> tuple[str, str]:
        """Where a call ends: the closing tags of search and answer."""
        return (f"</{self.search}>", f"</{self.answer}>")

    @cached_property
    def think_start(self) -> str:
        """The opening think tag."""
        return f"<{self.think}>"

    @cached_property
    def think_end(self) -> str:
        """The closing think tag."""
        return f"</{self.think}>"

    @cached_property
    def closing(self) -> dict[str, str]:
        """The closing tags of search and answer by name."""
        return {name: f"</{name}>" for name in (self.search, self.answer)}

    @cached_property
    def opening(self) -> re.Pattern[str]:
        """Matches an opening think, search or answer tag; group 1 is its name."""
        return re.compile(f"<({'|'.join(map(re.escape, (self.think, self.search, self.answer)))})>")


class ActionKind(StrEnum):
    """What an action turned out to be."""

    SEARCH = "search"
    ANSWER = "answer"
    INVALID = "invalid"


_SEARCH, _ANSWER, _INVALID = ActionKind  # a member's name is looked up slowly, and these are needed in every step


class ParsedAction(NamedTuple):
    """What an action says.

    Attributes:
        kind: Search, answer or invalid.
        content: The query, or the answers as written, without surrounding white space; empty if invalid.
        reason: Why it is invalid; empty otherwise.
    """

    kind: ActionKind
    content: str = ""
    reason: str = ""


_parsed: Callable[[tuple[ActionKind, str, str]], ParsedAction] = partial(tuple.__new__, ParsedAction)
"""``ParsedAction(*fields)`` in half the time, for the action that most steps read."""


DEFAULT_TAGS = Tags()


def parse_action(text: str, tags: Tags = DEFAULT_TAGS) -> ParsedAction:
    """Find the first complete search or answer outside the think block.

    Tags are exact: no other case, no attributes. Between an opening think tag and the next closing one nothing is an
    action; after an opening one that is never closed nothing is. If the first think tag of the text is a closing one,
    the block was opened in the prompt and everything before it is thought. A search or answer that is never closed is
    skipped. Time is linear in the length of the text.
    """
    think, think_end, find_opening = tags.think, tags.think_end, tags.opening.search
    match = find_opening(text)
    if match and match[1] != think:
        # Unless an opening tag comes first, a closing one belongs to a block that was opened in the prompt.
        first_end = text.find(think_end)
        if first_end >= 0 and text.find(tags.think_start, 0, first_end) < 0:
            match = find_opening(text, first_end)
    unclosed: set[str] | None = None
    reason = ""
    while match:
        name, position = match[1], match.end()
        if name == think:
            end = text.find(think_end, position)
            if end < 0:
                return ParsedAction(_INVALID, reason=f"its {think} block is never closed")
            position = end + len(think_end)
        elif unclosed is None or name not in unclosed:
            end = text.find(tags.closing[name], position)
            if end >= 0:
                content = text[position:end].strip()
                if name == tags.answer:
                    return ParsedAction(_ANSWER, content)
                if content:
                    return _parsed((_SEARCH, content, ""))
                return ParsedAction(_INVALID, reason=f"its {tags.search} is empty")
            unclosed = {name} if unclosed is None else unclosed | {name}
            reason = f"its {name} tag is never closed"
        match = find_opening(text, position)
    reason = reason or f"it has no complete {tags.search} or {tags.answer} after the thinking"
    return ParsedAction(_INVALID, reason=reason)


@dataclass(frozen=True)
class Instructions:
    """All text that the environment writes, as templates for ``str.format``.

    Every template but ``question`` and ``document`` knows ``{think} {end_think} {search} {end_search} {answer}
    {end_answer} {information} {end_information}``; the other fields it may use are listed with it.

    Attributes:
        task: What the agent reads first: ``{questions}`` (required), ``{num_questions}``, ``{max_turns}``, ``{top_k}``,
            and the sentences ``{count_rule}``, ``{invalid_rule}``, ``{deadline_rule}`` that say how the episode is
            configured.
        question: One question: ``{number}`` from 1, ``{question}``.
        question_joiner: Between two questions.
        hint: Turns left, shown while there are several: ``{left}``.
        last_hint: The same when one turn is left.
        document: One passage: ``{k}`` from 1, ``{title}``, ``{text}``.
        document_joiner: Between two passages.
        nothing_found: In place of passages when a search found none.
        invalid: Reply to an invalid action: ``{reason}``.
        before: Before the information block.
        after: After the information block.
    """

    task: str
    question: str = "{number}. {question}"
    question_joiner: str = "\n"
    hint: str = "[HINT]You have {left} turns left.[/HINT]\n\n"
    last_hint: str = "[HINT]You have 1 turn left. You must answer in the next turn.[/HINT]\n\n"
    document: str = "Doc {k}(Title: {title}) {text}\n"
    document_joiner: str = ""
    nothing_found: str = "No passage was found. Try another query.\n"
    invalid: str = (
        "Your last reply was invalid: {reason}. Close your thinking, then write exactly one search or one answer and "
        "close its tag.\n"
    )
    before: str = "\n\n"
    after: str = "\n\n"

    def __post_init__(self) -> None:
        known = {"task": _TASK_FIELDS, "question": {"number", "question"}, "hint": {"left"}, "last_hint": {"left"}}
        known |= {"document": {"k", "title", "text"}, "invalid": {"reason"}}
        for field in fields(self):
            tags = set() if field.name in ("question", "document") else _TAG_FIELDS
            _check_template(field.name, getattr(self, field.name), known.get(field.name, set()) | tags)
        if "{questions}" not in self.task:
            raise ConfigError("the task template of the instructions must contain {questions}")


_TAG_FIELDS = {side + name for side in ("", "end_") for name in ("think", "search", "answer", "information")}
_TASK_FIELDS = {"questions", "num_questions", "max_turns", "top_k", "count_rule", "invalid_rule", "deadline_rule"}


def _check_template(name: str, template: str, known: set[str]) -> None:
    try:
        used = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ConfigError(f"instructions.{name}: {error}; write {{{{ and }}}} for literal braces") from None
    if unknown := used - known:
        raise ConfigError(
            f"instructions.{name} uses {{{min(unknown)}}}; it may use {', '.join(sorted(known))}; "
            "write {{ and }} for literal braces"
        )


FULL = Instructions(
    task="""\
Answer the questions at the end. You can search a collection of passages. You have {max_turns} turns.

In every turn write your reasoning, then one action:
{think} your reasoning, and everything you have found out so far {end_think}
followed by either a search
{search} one query about one question {end_search}
or, to finish, your answers
{answer} answer 1; answer 2; ... {end_answer}

After a search you receive {information} the number of turns you have left and up to {top_k} passages {end_information}.
Earlier turns may be removed from what you see. What you still need must be written again inside {think} in every turn.

Rules:
- The first complete search or answer after the thinking is your action. Nothing inside the thinking is an action, and \
whatever follows the action is ignored. A query must not be empty.
- {invalid_rule}
- The answer ends the episode. If you have not answered when your turns are used up, you score 0.{deadline_rule}
- Separate answers with ";" and give them in the order of the questions. If an answer itself contains ";", write "," \
in its place.
- {count_rule}
- An answer is right if it equals an accepted answer, apart from upper and lower case, punctuation, spacing and \
the words a, an, the. So give short answers: a name, a number, a date, not a sentence. Your score is the number of \
right answers.

{num_questions} question(s):
{questions}
"""
)

# Every word follows a space, so that a small vocabulary needs each word only once.
TERSE = Instructions(
    task="Q: {questions}",
    question="{question}",
    question_joiner=" ",
    hint=" {left} left.",
    last_hint=" {left} left.",
    document=" {title}: {text}",
    document_joiner="",
    nothing_found=" nothing found",
    invalid=" invalid action",
    before="",
    after="",
)

PRESETS = {"full": FULL, "terse": TERSE}


def instructions(spec: str | Instructions) -> Instructions:
    """Turn the ``instructions`` argument of an environment into templates.

    Args:
        spec: ``full``, ``terse``, a task template that contains ``{questions}`` (the rest is as in ``full``), or an
            object.

    Raises:
        ConfigError: If the name is unknown or a template uses an unknown field.
    """
    if isinstance(spec, Instructions):
        return spec
    if spec in PRESETS:
        return PRESETS[spec]
    if isinstance(spec, str) and "{" in spec:
        return replace(FULL, task=spec)
    raise ConfigError(
        f"instructions is {spec!r}; use {', '.join(PRESETS)}, a template with {{questions}}, or Instructions"
    )


class Renderer:
    """Writes what the agent reads.

    Args:
        templates: The text around the data.
        tags: Tag names.
        max_turns: Turns of an episode.
        top_k: Passages per search.
        on_invalid: ``feedback`` or ``terminate``; stated in the task text.
        answer_count: ``strict`` or ``lenient``; stated in the task text.
        max_passage_chars: A longer title or text is cut at a word and ends in an ellipsis; None never cuts.
        deadline_s: Wall-clock limit of an episode; stated in the task text.
    """

    def __init__(
        self,
        templates: Instructions = FULL,
        tags: Tags = DEFAULT_TAGS,
        *,
        max_turns: int = 6,
        top_k: int = 3,
        on_invalid: str = "feedback",
        answer_count: str = "strict",
        max_passage_chars: int | None = 2000,
        deadline_s: float | None = None,
    ) -> None:
        self._names = tags.names
        self._max_passage_chars = sys.maxsize if max_passage_chars is None else max_passage_chars
        self._tags = {name: f"<{getattr(tags, name)}>" for name in ("think", "search", "answer", "information")}
        self._tags |= {f"end_{name}": f"</{tag[1:]}" for name, tag in self._tags.items()}
        self._templates = templates
        self._settings = {
            "max_turns": max_turns,
            "top_k": top_k,
            "invalid_rule": _INVALID_RULES[on_invalid],
            "deadline_rule": "" if deadline_s is None else f" The same if {deadline_s:g} seconds have passed.",
        }
        self._answer_count = answer_count
        fixed = {
            field.name: getattr(templates, field.name)
            for field in fields(templates)
            if field.name not in ("task", "question", "document", "hint", "invalid")
        }
        fixed = {name: template.format(left=1, **self._tags) for name, template in fixed.items()}
        self._nothing_found = fixed["nothing_found"]
        self._question_joiner = fixed["question_joiner"]
        opening = fixed["before"] + self._tags["information"]
        self._close = self._tags["end_information"] + fixed["after"]
        self._document_joiner = fixed["document_joiner"]
        self._layouts: dict[int, str] = {}
        hints = [templates.hint.format(left=left, **self._tags) for left in range(max_turns + 1)]
        self._openings = [opening + hint for hint in ("", fixed["last_hint"], *hints[2:])]

    def task(self, task: Task) -> str:
        """Write the task text: the protocol, every rule that scoring applies, and the questions."""
        number = len(task.questions)
        questions = self._question_joiner.join(
            self._templates.question.format(number=i, question=question)
            for i, question in enumerate(task.questions, start=1)
        )
        count_rule = _COUNT_RULES[self._answer_count].format(number=number)
        return self._templates.task.format(
            questions=neutralise(questions, self._names),
            num_questions=number,
            count_rule=count_rule,
            **self._settings,
            **self._tags,
        )

    def passages(self, passages: Sequence[Passage], left: int) -> str:
        """Write the reply to a search; ``left`` turns remain."""
        if not passages:
            return f"{self._openings[left]}{self._nothing_found}{self._close}"
        limit = self._max_passage_chars
        pieces: list[str] = []
        for passage in passages:
            title, text = passage.title.strip(), passage.text.strip()
            pieces.append(title if len(title) <= limit else _shorten(title, limit))
            pieces.append(text if len(text) <= limit else _shorten(text, limit))
        # After joining, so that no tag can be pieced together from a title and a text, or from two passages.
        layout = self._layouts.get(len(passages)) or self._layout(len(passages))
        body = neutralise(layout.format(*pieces), self._names)
        return f"{self._openings[left]}{body}{self._close}"

    def _layout(self, count: int) -> str:
        """A template for ``count`` passages at once, with numbered fields: title, text, title, text, ..."""
        documents = [
            "".join(
                _escape(literal) + _field(name, spec, conversion, k)
                for literal, name, spec, conversion in Formatter().parse(self._templates.document)
            )
            for k in range(1, count + 1)
        ]
        layout = self._layouts[count] = _escape(self._document_joiner).join(documents)
        return layout

    def invalid(self, reason: str, left: int) -> str:
        """Write the reply to an invalid action; ``left`` turns remain."""
        feedback = self._templates.invalid.format(reason=reason, **self._tags)
        return f"{self._openings[left]}{feedback}{self._close}"


_INVALID_RULES = {
    "feedback": "A reply without a complete action is invalid: it costs a turn and you are told so.",
    "terminate": "A reply without a complete action is invalid: it ends the episode and you score 0.",
}
_COUNT_RULES = {
    "strict": "Give exactly {number} answer(s). With any other number of answers all of them score 0.",
    "lenient": "Give {number} answer(s). Missing answers score 0, superfluous ones are ignored.",
}
ON_INVALID = tuple(_INVALID_RULES)


def _escape(literal: str) -> str:
    return literal.replace("{", "{{").replace("}", "}}")


def _field(name: str | None, spec: str | None, conversion: str | None, k: int) -> str:
    """One field of the document template, in a template for several documents."""
    how = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
    if name == "k":
        return _escape(f"{{{how}}}".format(k))
    return "" if name is None else f"{{{2 * k - 2 + (name == 'text')}{how}}}"


def _shorten(text: str, limit: int) -> str:
    cut = text.rfind(" ", limit // 2, limit)
    return text[: cut if cut > 0 else limit].rstrip() + "…"
