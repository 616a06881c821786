"""From episodes to figures: scores, costs, and how sure we can be of them.

Pure, so a result can be checked from its episodes.

Scores are those that the environment gave to the action that ended an episode. The headline is the sum over the N
questions of an episode, averaged over episodes, as published; the share of right questions stands beside it. Costs
are measured in tokens:

- peak tokens: the largest call of an episode, prompt plus action;
- dependency: the sum over calls of (n_prompt + n_action / 2) · n_action, the number of (query, key) pairs of the
  sampled tokens (MEM1, arXiv 2506.15841).

Every figure has a 95 % interval by the percentile bootstrap over episodes. An episode that a retriever failure ended
enters none of them; it is counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopd_agents.episode import Call, Episode
from memopd_env.errors import MemOPDError
from memopd_env.scoring import paper_score_answers
from memopd_env.tasks.task import Task

RESAMPLES = 2000
CONFIDENCE = 0.95
Sizes = list[list[tuple[int, int]]]


class ScoreError(MemOPDError, ValueError):
    """Episodes cannot be scored; the message says which and why."""


def measure(
    episodes: Sequence[Episode],
    tasks: Mapping[str, Task] | None = None,
    *,
    count_tokens: Callable[[str], int] | None = None,
    counter_name: str = "",
    seed: int = 0,
) -> dict[str, Any]:
    """Return the figures of a set of episodes.

    Args:
        episodes: Played to their end, in any order.
        tasks: By id; with them the scores as MEM1's evaluation defines them (``paper_em``, ``paper_f1``) are added.
        count_tokens: Number of tokens of a text, for calls without token ids; default: see :func:`call_sizes`.
        counter_name: What the result calls ``count_tokens``.
        seed: Seed of the bootstrap.

    Returns:
        ``metrics`` (name -> ``mean``, ``low``, ``high``), ``stop_reasons``, ``episodes`` (``played``, ``scored``,
        ``excluded``), ``tokens_counted_by``, ``bootstrap``.

    Raises:
        ScoreError: If an episode has no score, or none is left after those that a retriever failure ended.
    """
    for episode in episodes:
        if "em" not in episode.info:
            raise ScoreError(
                f"episode {episode.number} (task {episode.task_id!r}) has no score: something outside the environment, "
                "such as TimeLimit, ended it; use max_turns or deadline_s instead"
            )
    # By number, so that the bootstrap draws the same episodes whatever order they were finished in.
    ordered = sorted(episodes, key=lambda episode: episode.number)
    scored = [episode for episode in ordered if not episode.info.get("excluded")]
    if not scored:
        raise ScoreError(f"none of {len(episodes)} episodes can be scored: the retriever failed in every one of them")
    sizes, counter = call_sizes(scored, count_tokens, counter_name)
    columns = _columns(scored, sizes)
    if tasks is not None:
        columns |= _paper_columns(scored, tasks)
    metrics = _with_intervals(columns, seed)
    excluded = len(episodes) - len(scored)
    return {
        "metrics": metrics,
        "stop_reasons": dict(sorted(Counter(episode.info["stop_reason"] for episode in scored).items())),
        "episodes": {"played": len(episodes), "scored": len(scored), "excluded": excluded},
        "tokens_counted_by": counter,
        "bootstrap": {
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "seed": seed,
            "method": "percentile over episodes",
        },
    }


def call_sizes(
    episodes: Sequence[Episode], count_tokens: Callable[[str], int] | None = None, counter_name: str = ""
) -> tuple[Sizes, str]:
    """Return for each call of each episode its prompt and action size in tokens, and how they were counted.

    The sources, the first that covers every call: the recorded token ids; ``count_tokens`` on the recorded text; what
    the endpoint reported; white-space separated words.
    """
    calls = [call for episode in episodes for call in episode.calls]
    if all(call.prompt_ids and call.action_ids for call in calls):
        return _sizes(episodes, lambda call: (len(call.prompt_ids), len(call.action_ids))), "the policy's token ids"
    if count_tokens is None and all({"prompt_tokens", "completion_tokens"} <= call.usage.keys() for call in calls):
        reported = _sizes(episodes, lambda call: (call.usage["prompt_tokens"], call.usage["completion_tokens"]))
        return reported, "the endpoint's own report"
    count = count_tokens or (lambda text: len(text.split()))

    def of_text(call: Call) -> tuple[int, int]:
        return count("".join(text for _, _, text in call.context)), count(call.text)

    return _sizes(episodes, of_text), counter_name if count_tokens else "white-space separated words"


def _sizes(episodes: Sequence[Episode], size: Callable[[Call], tuple[int, int]]) -> Sizes:
    return [[size(call) for call in episode.calls] for episode in episodes]


def _columns(episodes: Sequence[Episode], sizes: Sizes) -> dict[str, tuple[list[float], list[float]]]:
    """Return for each metric its numerator and denominator per episode."""
    one = [1.0] * len(episodes)
    questions = [float(episode.info["num_questions"]) for episode in episodes]
    turns = [float(episode.info["turns"]) for episode in episodes]
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for name in ("em", "f1", "sub_em"):
        values = [float(episode.info[name]) for episode in episodes]
        columns[name] = values, one
        columns[f"{name}_per_question"] = values, questions
    columns["peak_tokens"] = [float(max((sum(call) for call in calls), default=0)) for calls in sizes], one
    columns["dependency"] = [sum((prompt + action / 2) * action for prompt, action in calls) for calls in sizes], one
    columns["action_tokens"] = [float(sum(action for _, action in calls)) for calls in sizes], one
    columns["searches"] = [float(episode.info["searches"]) for episode in episodes], one
    columns["turns"] = turns, one
    columns["invalid_rate"] = [float(episode.info["invalid_actions"]) for episode in episodes], turns
    columns["answered_rate"] = [float(episode.info["stop_reason"] == "answered") for episode in episodes], one
    columns["seconds"] = [episode.seconds for episode in episodes], one
    return columns


def _paper_columns(
    episodes: Sequence[Episode], tasks: Mapping[str, Task]
) -> dict[str, tuple[list[float], list[float]]]:
    scores = []
    for episode in episodes:
        if episode.task_id not in tasks:
            raise ScoreError(
                f"episode {episode.number} plays task {episode.task_id!r}, which is not among the tasks given"
            )
        given = episode.info["answers"]
        answered = episode.info["stop_reason"] == "answered"
        scores.append(paper_score_answers("; ".join(given) if answered else None, tasks[episode.task_id].answers))
    one = [1.0] * len(episodes)
    return {"paper_em": ([score.em for score in scores], one), "paper_f1": ([score.f1 for score in scores], one)}


def _with_intervals(columns: Mapping[str, tuple[list[float], list[float]]], seed: int) -> dict[str, dict[str, float]]:
    names = list(columns)
    above, below = (np.array([columns[name][side] for name in names]).T for side in (0, 1))
    episodes = above.shape[0]
    # How often each episode is drawn in each resample; one product then gives every metric of every resample.
    draws = np.random.default_rng(seed).multinomial(episodes, np.full(episodes, 1 / episodes), size=RESAMPLES)
    counts = draws.astype(np.float64)
    resampled = _ratio(counts @ above, counts @ below)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail], axis=0)
    mean = _ratio(above.sum(0), below.sum(0))
    return {
        name: {"mean": float(mean[i]), "low": float(low[i]), "high": float(high[i])} for i, name in enumerate(names)
    }


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
