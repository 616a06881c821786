"""Make N-question tasks from single questions, so that what is held out stays held out.

Three steps, each a pure function of its input and a seed. *Prepare*: aliases join the accepted answers, and an accepted
answer that holds the separator ``;`` is led by a form that an agent can give. *Split*: a question belongs to one split
only, and so does every entity it rests on: a question whose entities already belong to different splits is left out.
*Compose*: shuffle a split and cut it into tasks of N; if more tasks are wanted than that gives, shuffle again. No
question stands twice in a task.

The manifest beside the files holds the hashes of what went in and what came out, and counts whatever was left out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memopd_env.errors import ConfigError, TaskError
from memopd_env.scoring import SEPARATOR, sayable
from memopd_env.tasks.io import read_rows, read_tasks, string_list, write_tasks
from memopd_env.tasks.task import Task

DEFAULT_SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Question:
    """One question of a QA set.

    Attributes:
        id: Unique within its set.
        text: The question.
        answers: Accepted answers; the first is one that an agent can give.
        entities: Titles the answer rests on; empty where unknown.
        source: Where it comes from.
        split: Its split if the set says so, else empty.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    entities: tuple[str, ...] = ()
    source: str = ""
    split: str = ""

    @property
    def key(self) -> str:
        """What makes two questions the same: the text without case and spacing."""
        return " ".join(self.text.casefold().split())


def read_questions(path: str | Path) -> list[Question]:
    """Read a QA file: ``{"id", "question", "golden_answers"}`` a record.

    ``aliases`` (more accepted answers), ``entities``, ``source`` and ``split`` are optional. JSONL or parquet; parquet
    in the field's schema and tasks of several questions are taken apart.

    Raises:
        TaskError: If the file is missing, empty or malformed, or a question has no accepted answer that can be given.
    """
    path = Path(path)
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for place, row in read_rows(path):
        if "question" not in row:
            return [question for task in read_tasks(path) for question in _questions_of_task(str(path), task)]
        question = _question_of_row(place, row)
        if question.id in seen:
            raise TaskError(f"{place}: the id {question.id!r} already stands at {seen[question.id]}; give each its own")
        seen[question.id] = place
        questions.append(question)
    return questions


def accepted_answers(place: str, answers: Iterable[str]) -> tuple[str, ...]:
    """Clean up accepted answers: no blanks, no duplicates, and first one without the separator.

    Raises:
        TaskError: If none is left that an agent can give.
    """
    kept = list(dict.fromkeys(answer.strip() for answer in answers if sayable(answer)))
    if not kept:
        raise TaskError(f"{place}: no accepted answer is left without blanks and {SEPARATOR!r}; give at least one")
    if SEPARATOR in kept[0]:
        kept.insert(0, sayable(kept[0]))
    return tuple(dict.fromkeys(kept))


def split_questions(
    questions: Sequence[Question],
    *,
    shares: Mapping[str, float] | None = None,
    given: Mapping[str, Sequence[str]] | None = None,
    seed: int = 0,
) -> tuple[dict[str, list[Question]], dict[str, int]]:
    """Give every question to one split.

    Without ``given``, questions are taken in a seeded order. One that shares nothing with an earlier one goes to the
    split that lacks most; one whose text or entities belong to a split goes there; one torn between splits is left out.

    With ``given`` the ids decide. A question whose text also stands in a later split of ``validation``, ``test`` leaves
    ``train``. Entities that two given splits share are counted, not removed.

    Args:
        questions: The whole set.
        shares: Share of each split; by default those that the questions name themselves, else 0.8 / 0.1 / 0.1.
        given: For each split the ids of its questions, e.g. from a split file.
        seed: Of the order.

    Returns:
        The questions of each split, and counts: ``left_out_conflicting``, ``left_out_duplicate``,
        ``left_out_unlisted``, ``entities_in_two_splits``.

    Raises:
        ConfigError: If a share is not positive.
        TaskError: If ``given`` names an unknown id, or one twice.
    """
    if given is None and shares is None and all(question.split for question in questions):
        given = {
            split: [question.id for question in questions if question.split == split]
            for split in dict.fromkeys(question.split for question in questions)
        }
    if given is not None:
        return _split_by_ids(questions, given)
    return _split_by_shares(questions, shares or DEFAULT_SHARES, seed)


def compose_tasks(
    questions: Sequence[Question],
    num_questions: int,
    *,
    seed: int = 0,
    count: int | None = None,
    split: str = "",
    name: str = "qa",
) -> list[Task]:
    """Cut shuffled questions into tasks of N.

    Args:
        questions: Questions of one split.
        num_questions: N.
        seed: Of the shuffles.
        count: Number of tasks; by default as many as use every question at most once.
        split: Written on every task.
        name: First part of the task ids.

    Returns:
        The tasks; the same arguments give the same tasks on every platform.

    Raises:
        ConfigError: If N or ``count`` is below 1 or there are fewer than N different questions.
    """
    unique = list({question.key: question for question in questions}.values())
    if num_questions < 1:
        raise ConfigError(f"num_questions is {num_questions}; a task has at least 1")
    if count is not None and count < 1:
        raise ConfigError(f"{count} tasks of split {split!r} are wanted; a task file has at least 1")
    if len(unique) < num_questions:
        raise ConfigError(
            f"split {split!r} has {len(unique)} different questions, too few for a task of {num_questions}; "
            "use a smaller N or a larger share"
        )
    per_pass = len(unique) // num_questions
    wanted = per_pass if count is None else count
    tasks: list[Task] = []
    for start in range(0, wanted, per_pass):
        generator = np.random.default_rng([seed, start // per_pass, *split.encode()])
        order = generator.permutation(len(unique))
        for i in range(min(per_pass, wanted - start)):
            chosen = [unique[j] for j in order[i * num_questions : (i + 1) * num_questions]]
            identifier = f"{name}/{split}/q{num_questions}/{seed}/{start + i}"
            tasks.append(_task_of_questions(identifier, chosen, split))
    return tasks


def compose_file(
    path: str | Path,
    out: str | Path,
    num_questions: int,
    *,
    seed: int = 0,
    counts: Mapping[str, int] | None = None,
    shares: Mapping[str, float] | None = None,
    split_file: str | Path | None = None,
    suffix: str = ".jsonl",
) -> dict[str, Any]:
    """Read a QA file and write one task file per split and ``manifest.json`` into a folder.

    Args:
        path: The QA file.
        out: Folder to write to; made if it is not there.
        num_questions: N.
        seed: Of splits and shuffles.
        counts: Number of tasks of a split; by default as many as use every question at most once.
        shares: Share of each split.
        split_file: JSON ``{split: [question ids]}``; then ``shares`` is not used.
        suffix: ``.jsonl`` or ``.parquet``.

    Returns:
        The manifest.

    Raises:
        ConfigError: If an argument makes no sense.
        TaskError: If a file is missing or malformed.
    """
    path, out = Path(path), Path(out)
    if suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"format {suffix!r} is unknown; use .jsonl or .parquet")
    given = None if split_file is None else read_split_file(split_file)
    splits, notes = split_questions(read_questions(path), shares=shares, given=given, seed=seed)
    for split in splits:
        _check_split_name(str(path if split_file is None else split_file), split)
    if unknown := set(counts or {}) - set(splits):
        raise ConfigError(f"a count is given for {', '.join(sorted(unknown))}, but the splits are {', '.join(splits)}")
    inputs = [path] if split_file is None else [path, Path(split_file)]
    files = {split: out / f"{split}{suffix}" for split in splits}
    for file in (*files.values(), out / MANIFEST):
        if file.resolve() in [item.resolve() for item in inputs]:
            raise ConfigError(f"{file} is read, and would be overwritten; write to another folder")
    # All are composed before the first is written: a split that is too small leaves no half of a folder.
    composed = {
        split: compose_tasks(
            questions, num_questions, seed=seed, count=(counts or {}).get(split), split=split, name=path.stem
        )
        for split, questions in splits.items()
    }
    manifest: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "num_questions": num_questions,
        "seed": seed,
        "inputs": {item.name: _sha256(item) for item in inputs},
        "splits": {},
        **notes,
    }
    for split, questions in splits.items():
        file = files[split]
        write_tasks(composed[split], file)
        manifest["splits"][split] = {
            "file": file.name,
            "tasks": len(composed[split]),
            "questions": len({question.key for question in questions}),
            "sha256": _sha256(file),
        }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="ascii")
    return manifest


def read_split_file(path: str | Path) -> dict[str, list[str]]:
    """Read ``{split: [question ids]}``.

    Raises:
        TaskError: If the file is missing or malformed.
    """
    path = Path(path)
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"{path}: there is no such split file; check the path (relative to {Path.cwd()})") from None
    except (ValueError, RecursionError, OSError) as error:
        raise TaskError(f"{path} is not UTF-8 JSON ({error}); write {{split: [question ids]}}") from None
    if not isinstance(splits, dict) or not splits:
        raise TaskError(f"{path}: write one object {{split: [question ids]}}")
    for split, ids in splits.items():
        _check_split_name(str(path), split)
        string_list(str(path), split, ids)
    return splits


def _check_split_name(place: str, split: str) -> None:
    # Splits become file names.
    if not split.replace("-", "").replace("_", "").isalnum():
        raise TaskError(f"{place}: the split name {split!r} must consist of letters, digits, - and _")


def _question_of_row(place: str, row: Mapping[str, Any]) -> Question:
    if "golden_answers" not in row or not isinstance(row["question"], str) or not row["question"].strip():
        raise TaskError(
            f'{place} has the fields {", ".join(row)}; it needs {{"id", "question", "golden_answers": [..]}}'
        )
    if not isinstance(row.get("id"), (str, int)) or row["id"] == "":
        raise TaskError(f"{place}: it has no id; give every question a non-empty id of its own")
    golds = string_list(place, "golden_answers", row["golden_answers"])
    aliases = string_list(place, "aliases", row.get("aliases") or [])
    return Question(
        id=str(row["id"]),
        text=row["question"],
        answers=accepted_answers(place, [*golds, *aliases]),
        entities=tuple(string_list(place, "entities", row.get("entities") or [])),
        source=str(row.get("source") or ""),
        split=str(row.get("split") or ""),
    )


def _questions_of_task(place: str, task: Task) -> list[Question]:
    entities = task.entities or [()] * len(task.questions)
    return [
        Question(
            f"{task.id}#{number}",
            text,
            accepted_answers(f"{place}, task {task.id!r}, question {number}", answers),
            tuple(titles),
            task.source,
            task.split,
        )
        for number, (text, answers, titles) in enumerate(zip(task.questions, task.answers, entities, strict=True), 1)
    ]


def _split_by_shares(
    questions: Sequence[Question], shares: Mapping[str, float], seed: int
) -> tuple[dict[str, list[Question]], dict[str, int]]:
    if not shares or any(not 0 < share < math.inf for share in shares.values()):
        raise ConfigError(f"the shares are {dict(shares)}; each must be a number greater than 0")
    total = sum(shares.values())
    splits: dict[str, list[Question]] = {split: [] for split in shares}
    owner: dict[str, str] = {}
    notes: Counter[str] = Counter()
    for i in np.random.default_rng([seed, 0]).permutation(len(questions)):
        question = questions[i]
        # Prefixes keep a question apart from an entity of the same text.
        keys = [f"q:{question.key}", *(f"e:{entity.casefold()}" for entity in question.entities)]
        owners = {owner[key] for key in keys if key in owner}
        if len(owners) > 1:
            notes["left_out_conflicting"] += 1
            continue
        taken = sum(map(len, splits.values())) + 1
        lacking = max(shares, key=lambda split: shares[split] / total - len(splits[split]) / taken)
        split = owners.pop() if owners else lacking
        owner.update(dict.fromkeys(keys, split))
        splits[split].append(question)
    return splits, _complete(notes)


def _split_by_ids(
    questions: Sequence[Question], given: Mapping[str, Sequence[str]]
) -> tuple[dict[str, list[Question]], dict[str, int]]:
    by_id = {question.id: question for question in questions}
    splits: dict[str, list[Question]] = {}
    listed: dict[str, str] = {}
    for split, ids in given.items():
        for identifier in ids:
            if identifier not in by_id:
                raise TaskError(f"split {split!r} lists the question {identifier!r}, which the QA file does not hold")
            if identifier in listed:
                raise TaskError(f"question {identifier!r} is listed twice: {listed[identifier]!r} and {split!r}")
            listed[identifier] = split
        splits[split] = [by_id[identifier] for identifier in ids]
    notes = Counter(left_out_unlisted=len(questions) - len(listed))
    # What is held out stays whole: the copy of a question leaves the split that is trained on first.
    kept: set[str] = set()
    for split in sorted(splits, key=lambda name: name == "train"):
        fresh = [question for question in splits[split] if question.key not in kept]
        notes["left_out_duplicate"] += len(splits[split]) - len(fresh)
        splits[split] = fresh
        kept |= {question.key for question in fresh}
    homes = Counter(
        entity
        for members in splits.values()
        for entity in {entity.casefold() for question in members for entity in question.entities}
    )
    notes["entities_in_two_splits"] = sum(1 for number in homes.values() if number > 1)
    return splits, _complete(notes)


def _complete(notes: Counter[str]) -> dict[str, int]:
    names = ("left_out_conflicting", "left_out_duplicate", "left_out_unlisted", "entities_in_two_splits")
    return {name: notes[name] for name in names}


def _task_of_questions(identifier: str, questions: Sequence[Question], split: str) -> Task:
    known = any(question.entities for question in questions)
    return Task(
        id=identifier,
        questions=[question.text for question in questions],
        answers=[question.answers for question in questions],
        source="+".join(sorted({part for question in questions for part in question.source.split("+") if part})),
        split=split,
        entities=[question.entities for question in questions] if known else [],
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
