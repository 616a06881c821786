"""The environment: an episode is one task, a turn is one action and one reply, and the context is rebuilt every turn.

``step`` has two halves so that many environments can share one search: ``begin_step`` reads the action and returns the
query it wants answered, ``finish_step`` takes the passages and does everything else. Neither half knows who searches.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium import spaces

from memopd_env.errors import ActionError, ConfigError
from memopd_env.memory import MemoryPolicy, Segment, SegmentKind, Turn, memory_policy
from memopd_env.protocol import (
    DEFAULT_TAGS,
    ON_INVALID,
    ActionKind,
    Instructions,
    ParsedAction,
    Renderer,
    Tags,
    parse_action,
)
from memopd_env.protocol import (
    instructions as resolve_instructions,
)
from memopd_env.retrieval.base import Passage, RetrievalError, Retriever, search
from memopd_env.scoring import ANSWER_COUNTS, score_answers, split_answers
from memopd_env.sources import resolve_retriever, resolve_tasks
from memopd_env.spaces import UnicodeText
from memopd_env.tasks.task import Task

if TYPE_CHECKING:
    from memopd_env.tasks.world import WorldConfig

ON_RETRIEVER_ERROR = ("raise", "truncate")

# A member's name is looked up slowly, and these are needed in every step.
_SEARCH, _ANSWER, _INVALID = ActionKind.SEARCH, ActionKind.ANSWER, ActionKind.INVALID
_INFORMATION = SegmentKind.INFORMATION


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    INVALID = "invalid"
    MAX_TURNS = "max_turns"
    DEADLINE = "deadline"
    RETRIEVER_ERROR = "retriever_error"


class MemOPDEnv(gym.Env[dict[str, Any], str]):
    """N questions, a search tool, and a context that does not grow.

    ## Description
    The agent answers N questions in one episode. In each turn it writes its thoughts and then either a search query or
    its answers. Before every turn a memory policy rebuilds the context from the task and the turns so far; under
    ``consolidate`` only the agent's last action and the newest search result are left, so what the agent wants to
    remember it must write. The setting is that of MEM1 (arXiv 2506.15841) and MemOPD (arXiv 2608.07068).

    ## Observation space
    ``Dict`` of ``task`` (instructions and questions), ``memory`` (what the policy kept of earlier turns),
    ``information`` (the newest reply of the environment, empty at first), each :class:`UnicodeText`, and
    ``turns_left``, ``Discrete``. The three texts, joined in this order without anything between them, are exactly the
    context.

    ## Action space
    :class:`UnicodeText`: the raw output of the agent, e.g. ``<think>…</think><search>…</search>`` or
    ``<think>…</think><answer>first; second</answer>``. It is never trimmed or rewritten.

    ## Reward
    0 in every turn but the last; then the number of questions answered exactly right (0..N) after SQuAD normalisation,
    if the episode ended with an answer.

    ## Episode end
    Terminated by an answer, or by an invalid action under ``on_invalid="terminate"``. Truncated when the turns are used
    up, when ``deadline_s`` has passed (an answer that comes too late counts for nothing), or when the retriever failed
    under ``on_retriever_error="truncate"``.

    ## Info
    Always ``context``, the tuple of :class:`Segment` behind the observation, and ``task_id``. After a step also
    ``action`` (``search``, ``answer`` or ``invalid``). At the end ``episode``, a plain dict: ``task_id``, ``answers``
    (as given), ``em``, ``f1``, ``sub_em`` (sums over questions), ``per_question`` (the same three as lists),
    ``num_questions``, ``searches``, ``turns``, ``invalid_actions``, ``stop_reason`` (a value of :class:`StopReason`),
    ``excluded`` (True if the retriever failed: such an episode belongs neither into training nor into scores).
    Gymnasium's ``RecordEpisodeStatistics`` uses the key ``episode`` too: give it another, ``stats_key="statistics"``.

    ## Arguments
    See ``Args`` below. ``reset(options={"task_index": i})`` plays task ``i``; otherwise the task is drawn with
    ``np_random``.

    ## Version history
    v0: first release.

    Args:
        num_questions: N of every task, fixed by the environment id; None takes tasks of any N, or built-in ones of two.
        tasks: A list of Task, the path of a task file (JSONL or parquet), or None for the built-in world.
        split: Only tasks of this split; None plays ``train`` of the built-in world, or every task given.
        retriever: A Retriever, the URL of a retrieval server, the path of a corpus (``.jsonl``) or of an index
            folder, or None for word search in the built-in world.
        memory: ``consolidate``, ``full``, ``window:K``, ``summary``, ``budget:T``, or a policy object.
        max_turns: Turns of an episode; by default 6 for up to 4 questions, else 20.
        top_k: Passages per search.
        on_invalid: ``feedback``: an invalid action costs a turn; ``terminate``: it ends the episode, as in MEM1.
        answer_count: ``strict``: a wrong number of answers scores 0; ``lenient``: it is padded or cut.
        tags: Tag names.
        instructions: ``full``, ``terse``, a task template, or an Instructions object.
        world: Preset name or WorldConfig of the built-in world.
        deadline_s: Wall-clock limit of an episode in seconds; None for none.
        on_retriever_error: ``raise``, or ``truncate`` the episode and mark it excluded.
        max_passage_chars: Longer passages are cut to this many characters; None never cuts.
        render_mode: ``ansi`` or None.

    Raises:
        ConfigError: If an argument makes no sense.
        TaskError: If a task file is missing or malformed.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (as gymnasium declares it)

    def __init__(
        self,
        num_questions: int | None = None,
        *,
        tasks: Sequence[Task] | str | Path | None = None,
        split: str | None = None,
        retriever: Retriever | str | Path | None = None,
        memory: str | MemoryPolicy = "consolidate",
        max_turns: int | None = None,
        top_k: int = 3,
        on_invalid: str = "feedback",
        answer_count: str = "strict",
        tags: Tags = DEFAULT_TAGS,
        instructions: str | Instructions = "full",
        world: str | WorldConfig = "default",
        deadline_s: float | None = None,
        on_retriever_error: str = "raise",
        max_passage_chars: int | None = 2000,
        render_mode: str | None = None,
    ) -> None:
        _check_choice("on_invalid", on_invalid, ON_INVALID)
        _check_choice("answer_count", answer_count, ANSWER_COUNTS)
        _check_choice("on_retriever_error", on_retriever_error, ON_RETRIEVER_ERROR)
        _check_whole(num_questions=num_questions, top_k=top_k, max_turns=max_turns, max_passage_chars=max_passage_chars)
        _check_positive(deadline_s=deadline_s)
        if not isinstance(tags, Tags):
            raise ConfigError(f"tags is {tags!r}; give memopd_env.protocol.Tags, e.g. Tags(search='query')")
        self.tasks: Sequence[Task] = resolve_tasks(tasks, split, num_questions, world)
        self.retriever: Retriever = resolve_retriever(retriever, tasks, world)
        self.memory = memory_policy(memory, tags.think)
        self.tags = tags
        self.top_k = top_k
        self.max_turns = max_turns or (6 if max(len(task.questions) for task in self.tasks) <= 4 else 20)
        self.render_mode = render_mode
        self._on_invalid = on_invalid
        self._answer_count = answer_count
        self._deadline_s = deadline_s
        self.on_retriever_error = on_retriever_error
        self._renderer = Renderer(
            resolve_instructions(instructions),
            tags,
            max_turns=self.max_turns,
            top_k=top_k,
            on_invalid=on_invalid,
            answer_count=answer_count,
            max_passage_chars=max_passage_chars,
            deadline_s=deadline_s,
        )
        self.action_space = UnicodeText()
        self.observation_space = spaces.Dict(
            {
                "task": UnicodeText(),
                "memory": UnicodeText(),
                "information": UnicodeText(),
                "turns_left": spaces.Discrete(self.max_turns + 1),
            }
        )
        self._task: Task | None = None
        self._ended = True

    @property
    def task(self) -> Task:
        """The task being played, with its answers: for oracles and records, never for an agent that is measured."""
        if self._task is None:
            raise gym.error.ResetNeeded("call reset() before reading the task")
        return self._task

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Seeds ``np_random``, which draws the task.
            options: ``{"task_index": i}`` plays ``tasks[i]`` instead.

        Raises:
            ConfigError: If there is no task of that index, or no such option.
        """
        super().reset(seed=seed)
        index = _task_index(options, len(self.tasks))
        if index is None:
            index = int(self.np_random.integers(len(self.tasks)))
        self._task = self.tasks[index]
        self._task_text = self._renderer.task(self._task)
        self._turns: list[Turn] = []
        self._searches = 0
        self._invalid_actions = 0
        self._pending: tuple[str, ParsedAction] | None = None
        self._ended = False
        self._started = time.monotonic()
        observation, context = self._observe()
        return observation, {"context": context, "task_id": self._task.id}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Play one turn: read the action, search if it asks for it, and rebuild the context.

        Raises:
            RetrievalError: If the retriever fails and ``on_retriever_error`` is ``raise``.
        """
        query = self.begin_step(action)
        if query is None:
            return self.finish_step(None)
        try:
            passages = search(self.retriever, [query], self.top_k)[0]
        except RetrievalError as error:
            return self.finish_step(error)
        return self.finish_step(passages)

    def begin_step(self, action: str) -> str | None:
        """First half of a step: read the action; return the query to search, or None if there is nothing to search.

        Raises:
            ResetNeeded: If the episode has ended or none was started.
            ActionError: If the action is not a text.
        """
        if self._ended:
            raise gym.error.ResetNeeded("the episode has ended: call reset() before the next step")
        try:
            parsed = parse_action(action, self.tags)
        except TypeError:
            raise ActionError(f"an action is a text (str), not {type(action).__name__}: {action!r:.100}") from None
        self._pending = (action, parsed)
        return parsed.content if parsed.kind is _SEARCH and (self._deadline_s is None or not self._late()) else None

    def finish_step(
        self, passages: Sequence[Passage] | RetrievalError | None
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Second half of a step.

        Args:
            passages: What the search found, the error it died of, or None if ``begin_step`` asked for no search.

        Raises:
            RetrievalError: The one given, if ``on_retriever_error`` is ``raise``; the step can then be begun again.
        """
        if self._pending is None:
            raise gym.error.ResetNeeded("finish_step() follows begin_step()")
        action, parsed = self._pending
        failed = isinstance(passages, RetrievalError)
        if failed and self.on_retriever_error == "raise":
            self._pending = None
            raise passages
        self._pending = None
        stop = self._stop_reason(parsed, failed)
        left = self.max_turns - len(self._turns) - 1
        if parsed.kind is _SEARCH:
            self._searches += 1
        elif parsed.kind is _INVALID:
            self._invalid_actions += 1
        self._turns.append(Turn(action, self._reply(parsed, None if failed else passages, left, stop)))
        observation, context = self._observe()
        info: dict[str, Any] = {"context": context, "task_id": self.task.id, "action": parsed.kind}
        if stop is None:
            return observation, 0.0, False, False, info
        self._ended = True
        info["episode"] = self._summary(parsed, stop)
        terminated = stop in (StopReason.ANSWERED, StopReason.INVALID)
        return observation, info["episode"]["em"], terminated, not terminated, info

    def render(self) -> str | None:
        """Return the context as the agent sees it (``ansi``)."""
        if self.render_mode != "ansi":
            return None
        return "".join(segment.text for segment in self.memory.context(self._task_text, self._turns))

    def _late(self) -> bool:
        return time.monotonic() - self._started > (self._deadline_s or math.inf)

    def _stop_reason(self, parsed: ParsedAction, failed: bool) -> StopReason | None:
        if failed:
            return StopReason.RETRIEVER_ERROR
        if self._deadline_s is not None and self._late():
            return StopReason.DEADLINE
        if parsed.kind is _ANSWER:
            return StopReason.ANSWERED
        if parsed.kind is _INVALID and self._on_invalid == "terminate":
            return StopReason.INVALID
        return StopReason.MAX_TURNS if len(self._turns) + 1 >= self.max_turns else None

    def _reply(
        self, parsed: ParsedAction, passages: Sequence[Passage] | None, left: int, stop: StopReason | None
    ) -> str:
        if parsed.kind is _SEARCH and passages is not None:
            return self._renderer.passages(passages, left)
        if parsed.kind is _INVALID and stop is not StopReason.INVALID:
            return self._renderer.invalid(parsed.reason, left)
        return ""

    def _observe(self) -> tuple[dict[str, Any], tuple[Segment, ...]]:
        context = self.memory.context(self._task_text, self._turns)
        last = context[-1]
        kept, information = (context[1:-1], last.text) if last.kind is _INFORMATION else (context[1:], "")
        observation = {
            "task": context[0].text,
            "memory": kept[0].text if len(kept) == 1 else "".join([segment.text for segment in kept]),
            "information": information,
            "turns_left": self.max_turns - len(self._turns),
        }
        return observation, context

    def _summary(self, parsed: ParsedAction, stop: StopReason) -> dict[str, Any]:
        text = parsed.content if stop is StopReason.ANSWERED else None
        score = score_answers(text, self.task.answers, self._answer_count)
        return {
            "task_id": self.task.id,
            "answers": [] if text is None else split_answers(text),
            "em": score.em,
            "f1": score.f1,
            "sub_em": score.sub_em,
            "per_question": score.per_question,
            "num_questions": len(self.task.questions),
            "searches": self._searches,
            "turns": len(self._turns),
            "invalid_actions": self._invalid_actions,
            "stop_reason": stop.value,
            "excluded": stop is StopReason.RETRIEVER_ERROR,
        }


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; use one of {', '.join(allowed)}")


def _task_index(options: Any, tasks: int) -> int | None:
    if not options:
        return None
    if not isinstance(options, Mapping) or set(options) != {"task_index"}:
        raise ConfigError(f"options is {options!r:.100}; the only option of reset is {{'task_index': i}}")
    index = options["task_index"]
    if index is None:
        return None
    if not isinstance(index, numbers.Integral):
        raise ConfigError(f"task_index is {index!r:.100}; it must be a whole number")
    at = int(index)
    if not 0 <= at < tasks:
        raise ConfigError(f"task_index is {at}, but there are {tasks} tasks, counted from 0")
    return at


def _check_whole(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not (isinstance(value, numbers.Integral) and value > 0):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number greater than 0")


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (isinstance(value, numbers.Real) and 0 < value < math.inf):
            raise ConfigError(f"{name} is {value!r}; it must be a number greater than 0 and finite")
