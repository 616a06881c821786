"""Task files: read and write them, in our form and in the field's.

JSONL, one task a line: ``{"id", "question", "golden_answers"}`` for one question, as retrieval-augmented QA sets have
it, or ``{"id", "questions", "answers"}`` for several; ``source``, ``split`` and ``entities`` are optional in both.

Parquet, in the schema that Search-R1 and MEM1 train from: ``data_source``, ``prompt`` (one user message), ``ability``,
``reward_model.ground_truth.target`` (a list of accepted answers per question) and ``extra_info``. Their ``prompt`` is
the only place that holds the questions, inside the instructions, so a file of theirs is read by finding them at the end
of the prompt; ours also lists them in ``extra_info``. Flat parquet with the columns of the JSONL form is read too.

Whatever is wrong with a file is a :class:`TaskError` that names the file, the line and the cure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopd_env.errors import TaskError
from memopd_env.tasks.task import Task

if TYPE_CHECKING:
    import pyarrow as pa

ABILITY = "fact-reasoning"
PARQUET_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")

_FORM = '{"id", "question", "golden_answers": [..]} or {"id", "questions": [..], "answers": [[..], ..]}'


def read_tasks(path: str | Path) -> list[Task]:
    """Read a task file, JSONL or parquet by its suffix.

    Args:
        path: ``.jsonl``, ``.json`` (one task a line) or ``.parquet``.

    Returns:
        The tasks in the order of the file; never empty.

    Raises:
        TaskError: If the file is missing, empty or malformed; the message names file, line and cure.
    """
    path = Path(path)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for place, row in read_rows(path):
        task = _task_of_row(place, row)
        if task.id in seen:
            raise TaskError(
                f"{place}: the id {task.id!r} already stands at {seen[task.id]}; give every task its own id"
            )
        seen[task.id] = place
        tasks.append(task)
    return tasks


def write_tasks(tasks: Iterable[Task], path: str | Path) -> None:
    """Write a task file, JSONL or parquet by its suffix; :func:`read_tasks` gives the same tasks back.

    The file is replaced only once all is written, so whatever goes wrong leaves the old one as it was.

    Raises:
        TaskError: If the suffix is unknown.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise TaskError(f"{path}: the suffix {path.suffix!r} is unknown; write .jsonl or .parquet")
    if path.is_dir():
        raise TaskError(f"{path} is a folder; name the task file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            pq.write_table(_parquet_table(tasks), partial)
        else:
            # ASCII, so that a lone surrogate in a question, which UTF-8 can not hold, survives.
            partial.write_text("".join(f"{json.dumps(_json_row(task))}\n" for task in tasks), encoding="ascii")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every record of a JSONL or parquet file with its place, ``file:line`` or ``file, row n``.

    Raises:
        TaskError: If the file is missing, empty, or not what its suffix says.
    """
    if not path.exists():
        raise TaskError(f"{path}: there is no such file; check the path (relative to {Path.cwd()})")
    if path.is_dir():
        raise TaskError(f"{path} is a folder; name the task file in it")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise TaskError(f"{path}: the suffix {path.suffix!r} is unknown; give .jsonl or .parquet")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    empty = True
    for place, row in rows:
        empty = False
        yield place, row
    if empty:
        raise TaskError(f"{path} holds no records; write one a line: {_FORM}")


def string_list(place: str, name: str, value: Any) -> list[str]:
    """Return ``value`` as a list of strings.

    Raises:
        TaskError: If it is something else.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise TaskError(f'{place}: {name} is {_short(value)}; it must be a list of strings, e.g. ["Paris"]')
    return list(value)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            place = f"{path}:{number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TaskError(f"{place}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise TaskError(f"{place} is not JSON ({error}); write one object a line: {_FORM}") from None
            if not isinstance(row, dict):
                raise TaskError(f"{place} holds {_short(row)}; write one object a line: {_FORM}")
            yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TaskError(f"{path} is not a readable parquet file ({error}); write it again or convert it") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", row


def _task_of_row(place: str, row: dict[str, Any]) -> Task:
    read = _field_schema if "reward_model" in row or "prompt" in row else _json_schema
    fields = read(place, row)
    try:
        return Task(**fields)
    except TaskError as error:
        raise TaskError(f"{place}: {error}") from None


def _json_schema(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    if "questions" in row:
        questions = string_list(place, "questions", row["questions"])
        answers = _lists(place, "answers", row.get("answers", row.get("golden_answers")))
        entities = _lists(place, "entities", row.get("entities") or [])
    elif "question" in row and "golden_answers" in row:
        questions = string_list(place, "question", [row["question"]])
        answers = [string_list(place, "golden_answers", row["golden_answers"])]
        entities = [string_list(place, "entities", row["entities"])] if row.get("entities") else []
    else:
        raise TaskError(f"{place} has the fields {', '.join(row) or '(none)'}; it needs {_FORM}")
    return {
        "id": _identifier(place, row),
        "questions": questions,
        "answers": answers,
        "source": str(row.get("source") or ""),
        "split": str(row.get("split") or ""),
        "entities": entities,
    }


def _field_schema(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    try:
        target = row["reward_model"]["ground_truth"]["target"]
        content = row["prompt"][-1]["content"]
    except (KeyError, TypeError, IndexError):
        raise TaskError(
            f"{place} lacks prompt[].content or reward_model.ground_truth.target; its columns are {', '.join(row)}, "
            f"those of the field's schema are {', '.join(PARQUET_COLUMNS)}"
        ) from None
    # Single-question sets have the accepted answers themselves as target.
    if isinstance(target, list) and target and all(isinstance(item, str) for item in target):
        target = [target]
    answers = _lists(place, "reward_model.ground_truth.target", target)
    questions = extra.get("questions") or _questions_of_prompt(place, content, len(answers))
    indices = extra.get("indices", extra.get("index", ""))
    number = "-".join(map(str, indices)) if isinstance(indices, list) else str(indices)
    split = str(extra.get("split") or "")
    source = str(row.get("data_source") or "")
    return {
        "id": str(extra.get("id") or f"{source}/{split}/{number or place}"),
        "questions": string_list(place, "extra_info.questions", questions),
        "answers": answers,
        "source": source,
        "split": split,
        "entities": _lists(place, "extra_info.entities", extra.get("entities") or []),
    }


def _questions_of_prompt(place: str, content: Any, count: int) -> list[str]:
    """Find the questions at the end of a prompt: after the last label ``question(s):``, joined by ``; ``."""
    if not isinstance(content, str) or not content.strip():
        raise TaskError(f"{place}: the prompt is empty; list the questions in extra_info.questions")
    text = content.strip()
    labels = [match.end() for match in re.finditer(r"questions?\s*:\s*", text, re.IGNORECASE)]
    last_line = text.rfind("\n") + 1
    for start in [*reversed(labels), last_line]:
        tail = text[start:].strip()
        questions = [tail] if count == 1 else re.split(r"(?<=\?);\s+", tail)
        if tail and len(questions) == count:
            return questions
    raise TaskError(
        f"{place}: there are answers to {count} questions, but the prompt does not end in that many joined by '; '; "
        "list them in extra_info.questions"
    )


def _lists(place: str, name: str, value: Any) -> list[list[str]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TaskError(f"{place}: {name} is {_short(value)}; it must be a list with one list of strings per question")
    return [string_list(place, f"{name}[{i}]", item) for i, item in enumerate(value)]


def _identifier(place: str, row: Mapping[str, Any]) -> str:
    identifier = row.get("id")
    if not isinstance(identifier, (str, int)) or isinstance(identifier, bool) or identifier == "":
        raise TaskError(f"{place}: id is {_short(identifier)}; give every task a non-empty id of its own")
    return str(identifier)


def _short(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _json_row(task: Task) -> dict[str, Any]:
    row: dict[str, Any] = {"id": task.id}
    if len(task.questions) == 1:
        row |= {"question": task.questions[0], "golden_answers": list(task.answers[0])}
        row |= {"entities": list(task.entities[0])} if task.entities else {}
    else:
        row |= {"questions": list(task.questions), "answers": [list(accepted) for accepted in task.answers]}
        row |= {"entities": [list(titles) for titles in task.entities]} if task.entities else {}
    return row | {name: value for name, value in (("source", task.source), ("split", task.split)) if value}


def _parquet_table(tasks: Iterable[Task]) -> pa.Table:
    import pyarrow as pa

    # Imported here because the protocol itself knows tasks.
    from memopd_env.protocol import Renderer

    text, texts = pa.string(), pa.list_(pa.string())
    schema = pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": pa.struct({"target": pa.list_(texts)})}),
            "extra_info": pa.struct(
                {
                    "split": text,
                    "indices": pa.list_(pa.int64()),
                    "id": text,
                    "questions": texts,
                    "entities": pa.list_(texts),
                }
            ),
        }
    )
    rows = []
    for number, task in enumerate(tasks):
        max_turns = 6 if len(task.questions) <= 4 else 20
        rows.append(
            {
                "data_source": task.source,
                "prompt": [{"role": "user", "content": Renderer(max_turns=max_turns).task(task)}],
                "ability": ABILITY,
                "reward_model": {
                    "style": "rule",
                    "ground_truth": {"target": [list(accepted) for accepted in task.answers]},
                },
                "extra_info": {
                    "split": task.split,
                    "indices": [number],
                    "id": task.id,
                    "questions": list(task.questions),
                    "entities": [list(titles) for titles in task.entities],
                },
            }
        )
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError as error:
        raise TaskError(f"parquet holds UTF-8 only and a task holds a lone surrogate ({error}); write .jsonl") from None
