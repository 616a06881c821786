"""Composing tasks: nothing repeats, nothing leaks between splits, everything can be answered."""

import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_env import Task
from memopd_env.errors import ConfigError, TaskError
from memopd_env.scoring import score_answers
from memopd_env.tasks import read_tasks, write_tasks
from memopd_env.tasks.compose import (
    Question,
    accepted_answers,
    compose_file,
    compose_tasks,
    read_questions,
    read_split_file,
    split_questions,
)


def make_questions(number, entities_of=lambda i: (f"E{i}",)):
    return [Question(f"q{i}", f"Question {i}?", (f"a{i}",), tuple(entities_of(i)), "set") for i in range(number)]


questions_with_shared_entities = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(0, 12), max_size=3)), min_size=1, max_size=60
).map(
    lambda drawn: [
        Question(f"q{i}", f"Q{text}?", ("a",), tuple(f"E{e}" for e in set(es))) for i, (text, es) in enumerate(drawn)
    ]
)


@settings(max_examples=80, deadline=None)
@given(questions_with_shared_entities, st.integers(0, 5))
def test_splits_share_no_question_and_no_entity_and_every_question_is_accounted_for(questions, seed):
    splits, notes = split_questions(questions, seed=seed)
    for kind in (lambda q: {q.key}, lambda q: {entity.casefold() for entity in q.entities}):
        owners = {}
        for split, members in splits.items():
            for question in members:
                for value in kind(question):
                    assert owners.setdefault(value, split) == split
    assert sum(map(len, splits.values())) + notes["left_out_conflicting"] == len(questions)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(5, 40), st.integers(1, 30), st.integers(0, 3))
def test_no_question_stands_twice_in_a_task(number, available, count, seed):
    tasks = compose_tasks(make_questions(available), number, seed=seed, count=count)
    assert len(tasks) == count == len({task.id for task in tasks})
    assert all(len(set(task.questions)) == number for task in tasks)


def test_without_a_count_every_question_is_used_at_most_once():
    tasks = compose_tasks(make_questions(11), 2)
    asked = [question for task in tasks for question in task.questions]
    assert len(tasks) == 5 and len(set(asked)) == 10


def test_the_same_question_under_two_ids_counts_once():
    questions = [*make_questions(2), Question("copy", "QUESTION  1?", ("a1",))]
    assert len(compose_tasks(questions, 2)) == 1
    with pytest.raises(ConfigError, match="2 different questions"):
        compose_tasks(questions, 3)


def test_the_seed_decides_and_the_questions_are_shuffled():
    questions = make_questions(40)
    assert compose_tasks(questions, 4, seed=1) == compose_tasks(questions, 4, seed=1)
    assert compose_tasks(questions, 4, seed=1) != compose_tasks(questions, 4, seed=2)
    assert compose_tasks(questions, 4)[0].questions != tuple(question.text for question in questions[:4])


def test_shares_are_met_where_entities_allow():
    splits, notes = split_questions(make_questions(1000), shares={"train": 3, "test": 1})
    assert {split: len(members) for split, members in splits.items()} == {"train": 750, "test": 250}
    assert notes["left_out_conflicting"] == 0


def test_given_splits_are_kept_and_a_held_out_question_leaves_training():
    questions = [*make_questions(4, lambda i: ("Shared",)), Question("copy", "question 3?", ("a",), ("Shared",))]
    splits, notes = split_questions(questions, given={"train": ["q0", "copy"], "test": ["q2", "q3"]})
    assert {split: [q.id for q in members] for split, members in splits.items()} == {
        "train": ["q0"],
        "test": ["q2", "q3"],
    }
    assert notes == {
        "left_out_conflicting": 0,
        "left_out_duplicate": 1,
        "left_out_unlisted": 1,
        "entities_in_two_splits": 1,
    }


@pytest.mark.parametrize(
    ("given_splits", "complaint"),
    [({"train": ["q9"]}, "'q9'.*does not hold"), ({"train": ["q0"], "test": ["q0"]}, "listed twice")],
)
def test_given_splits_that_do_not_fit_are_refused(given_splits, complaint):
    with pytest.raises(TaskError, match=complaint):
        split_questions(make_questions(2), given=given_splits)


def test_questions_that_name_their_split_keep_it():
    questions = [Question(f"q{i}", f"Q{i}?", ("a",), split="dev" if i % 2 else "train") for i in range(4)]
    splits, _ = split_questions(questions)
    assert {split: len(members) for split, members in splits.items()} == {"train": 2, "dev": 2}


@pytest.mark.parametrize(
    ("answers", "accepted"),
    [
        (["a", " a ", "b"], ("a", "b")),
        (["AC;DC"], ("AC, DC", "AC;DC")),
        (["x", "y; z"], ("x", "y; z")),
        (["", " ", ";", "a"], ("a",)),
    ],
)
def test_accepted_answers_are_cleaned_and_can_be_given(answers, accepted):
    assert accepted_answers("here", answers) == accepted


def test_a_question_without_an_answer_that_can_be_given_is_an_error():
    with pytest.raises(TaskError, match="here"):
        accepted_answers("here", [";", " "])


def qa_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [
    {
        "id": i,
        "question": f"Who made work {i}?",
        "golden_answers": [f"Person {i}; the maker"],
        "aliases": [f"P{i}"],
        "entities": [f"Work {i}"],
        "source": "made",
        "kind": "ignored",
    }
    for i in range(60)
]


def test_a_qa_file_becomes_task_files_whose_canonical_answers_score_full_marks(tmp_path):
    manifest = compose_file(qa_file(tmp_path / "qa.jsonl", ROWS), tmp_path / "out", 3, seed=5)
    for split, entry in manifest["splits"].items():
        tasks = read_tasks(tmp_path / "out" / entry["file"])
        assert len(tasks) == entry["tasks"] > 0
        for task in tasks:
            assert task.split == split and len(task.questions) == 3
            assert score_answers("; ".join(golds[0] for golds in task.answers), task.answers).em == 3
            assert score_answers("; ".join(golds[-1] for golds in task.answers), task.answers).em == 3
            assert [titles[0].replace("Work", "Who made work") + "?" for titles in task.entities] == list(
                task.questions
            )


def test_the_manifest_holds_the_hashes_of_what_went_in_and_came_out(tmp_path):
    source = qa_file(tmp_path / "qa.jsonl", ROWS)
    manifest = compose_file(source, tmp_path / "out", 2)
    assert manifest["inputs"] == {"qa.jsonl": hashlib.sha256(source.read_bytes()).hexdigest()}
    for entry in manifest["splits"].values():
        assert entry["sha256"] == hashlib.sha256((tmp_path / "out" / entry["file"]).read_bytes()).hexdigest()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest


def test_composing_repeats_to_the_byte_in_a_new_process(tmp_path):
    qa_file(tmp_path / "qa.jsonl", ROWS)
    code = "from memopd_env.tasks.compose import compose_file; compose_file('qa.jsonl', 'there', 2, seed=3)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    compose_file(tmp_path / "qa.jsonl", tmp_path / "here", 2, seed=3)
    for file in (tmp_path / "here").iterdir():
        assert file.read_bytes() == (tmp_path / "there" / file.name).read_bytes()


def test_a_split_file_counts_and_parquet(tmp_path):
    source = qa_file(tmp_path / "qa.jsonl", ROWS)
    (tmp_path / "split.json").write_text(json.dumps({"train": [str(i) for i in range(40)], "test": ["50", "51", "52"]}))
    manifest = compose_file(
        source, tmp_path / "out", 2, split_file=tmp_path / "split.json", counts={"train": 100}, suffix=".parquet"
    )
    assert manifest["splits"]["train"]["tasks"] == 100 and manifest["splits"]["test"]["tasks"] == 1
    assert manifest["left_out_unlisted"] == 17
    assert set(manifest["inputs"]) == {"qa.jsonl", "split.json"}
    asked = {q for task in read_tasks(tmp_path / "out" / "train.parquet") for q in task.questions}
    assert len(asked) == 40


def test_a_count_for_a_split_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="dev"):
        compose_file(qa_file(tmp_path / "qa.jsonl", ROWS), tmp_path / "out", 2, counts={"dev": 1})


def test_a_task_file_is_taken_apart(tmp_path):
    tasks = [Task(f"t{i}", [f"a{i}?", f"b{i}?"], [["x"], ["y"]], entities=[["A"], ["B"]]) for i in range(3)]
    write_tasks(tasks, tmp_path / "t.parquet")
    questions = read_questions(tmp_path / "t.parquet")
    assert [question.id for question in questions][:3] == ["t0#1", "t0#2", "t1#1"]
    assert questions[1].entities == ("B",)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"id": 1, "question": "q?"}, ":1 has the fields"),
        ({"question": "q?", "golden_answers": ["a"]}, "no id"),
        ({"id": 1, "question": "q?", "golden_answers": [";"]}, ":1"),
        ({"id": 1, "question": "q?", "golden_answers": ["a"], "aliases": "b"}, "aliases is 'b'"),
    ],
)
def test_malformed_questions_name_file_and_line(tmp_path, row, complaint):
    with pytest.raises(TaskError, match=complaint):
        read_questions(qa_file(tmp_path / "qa.jsonl", [row]))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"train": "q0"}', '{"../evil": ["q0"]}', '{"train": [1]}', "nope"]
)
def test_malformed_split_files_are_refused(tmp_path, content):
    (tmp_path / "split.json").write_text(content)
    with pytest.raises(TaskError, match=r"split\.json"):
        read_split_file(tmp_path / "split.json")


def test_a_missing_split_file_is_named(tmp_path):
    with pytest.raises(TaskError, match="no such split file"):
        read_split_file(tmp_path / "gone.json")


def write_questions(path, number=20, **fields):
    rows = [{"id": str(i), "question": f"Q{i}?", "golden_answers": ["a"], **fields} for i in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_split_name_of_the_file_or_of_a_share_can_not_leave_the_folder(tmp_path):
    path = write_questions(tmp_path / "qa.jsonl", split="../outside")
    with pytest.raises(TaskError, match="split name"):
        compose_file(path, tmp_path / "out", 2)
    with pytest.raises(TaskError, match="split name"):
        compose_file(path, tmp_path / "out", 2, shares={"a/b": 1.0})
    assert [file.name for file in tmp_path.iterdir()] == ["qa.jsonl"]


def test_the_file_that_is_read_is_never_overwritten(tmp_path):
    path = write_questions(tmp_path / "train.jsonl")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="would be overwritten"):
        compose_file(path, tmp_path, 2)
    assert path.read_bytes() == before


def test_a_split_that_is_too_small_leaves_no_half_of_a_folder(tmp_path):
    path = write_questions(tmp_path / "qa.jsonl")
    with pytest.raises(ConfigError, match="too few"):
        compose_file(path, tmp_path / "out", 8)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [float("inf"), float("nan"), -0.5])
def test_a_share_is_a_positive_number(share):
    with pytest.raises(ConfigError, match="greater than 0"):
        split_questions(make_questions(10), shares={"train": share, "test": 1.0})


@pytest.mark.parametrize("count", [0, -3])
def test_a_task_file_has_at_least_one_task(count):
    with pytest.raises(ConfigError, match="at least 1"):
        compose_tasks(make_questions(10), 2, count=count)
