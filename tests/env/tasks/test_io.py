"""Task files: what is written comes back, what is malformed is named."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_env import Task
from memopd_env.errors import TaskError
from memopd_env.tasks import read_tasks, write_tasks

ONE = Task("one", ["Capital of France?"], [["Paris", "City of Paris"]], "geo", "test", [["France"]])
TWO = Task("two", ["Q; one?", "Zwei — 東京?"], [["a;b"], ["c", "d"]], "geo+bio", "train", [["E", "F"], []])
BARE = Task("bare", ["q?"], [["a"]])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_tasks_come_back_as_they_were(tmp_path, suffix):
    path = tmp_path / "deep" / f"tasks{suffix}"
    write_tasks([ONE, TWO, BARE], path)
    assert read_tasks(path) == [ONE, TWO, BARE]


def test_both_formats_convert_into_each_other(tmp_path):
    write_tasks([ONE, TWO], tmp_path / "a.jsonl")
    write_tasks(read_tasks(tmp_path / "a.jsonl"), tmp_path / "b.parquet")
    write_tasks(read_tasks(tmp_path / "b.parquet"), tmp_path / "c.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes()


text = st.text(st.characters(exclude_categories=()), min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_any_text_survives_jsonl(tmp_path_factory, data, number):
    task = Task(
        data.draw(text),
        data.draw(st.lists(text, min_size=number, max_size=number)),
        data.draw(st.lists(st.lists(text, min_size=1, max_size=3), min_size=number, max_size=number)),
    )
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    write_tasks([task], path)
    assert read_tasks(path) == [task]


def test_a_single_question_has_the_form_of_qa_sets(tmp_path):
    write_tasks([BARE], tmp_path / "t.jsonl")
    assert json.loads((tmp_path / "t.jsonl").read_text()) == {"id": "bare", "question": "q?", "golden_answers": ["a"]}


def test_parquet_has_the_columns_and_types_of_the_field(tmp_path):
    write_tasks([TWO], tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    [row] = table.to_pylist()
    assert row["prompt"][0]["role"] == "user" and "Q; one?" in row["prompt"][0]["content"]
    assert row["ability"] == "fact-reasoning"
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": [["a;b"], ["c", "d"]]}}
    assert row["extra_info"]["split"] == "train" and row["extra_info"]["indices"] == [0]


def field_file(path, content, target, extra=None):
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": content}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": target}},
        "extra_info": extra or {"split": "test", "indices": [4, 5]},
    }
    pq.write_table(pa.Table.from_pylist([row]), path)
    return path


def test_a_file_made_elsewhere_is_read_by_the_end_of_its_prompt(tmp_path):
    content = "Answer questions: rules.\nAnswer the following questions: who wrote it?; where is it?"
    [task] = read_tasks(field_file(tmp_path / "t.parquet", content, [["A"], ["B", "C"]]))
    assert task == Task("nq/test/4-5", ["who wrote it?", "where is it?"], [["A"], ["B", "C"]], "nq", "test")


def test_a_single_question_file_made_elsewhere_has_flat_answers(tmp_path):
    [task] = read_tasks(
        field_file(
            tmp_path / "t.parquet", "Do this. Question: who wrote it?\n", ["A", "B"], {"split": "train", "index": 3}
        )
    )
    assert task == Task("nq/train/3", ["who wrote it?"], [["A", "B"]], "nq", "train")


def test_a_prompt_without_that_many_questions_is_refused(tmp_path):
    with pytest.raises(TaskError, match=r"row 1.*2 questions.*extra_info\.questions"):
        read_tasks(field_file(tmp_path / "t.parquet", "Question: only one?", [["A"], ["B"]]))


def test_flat_parquet_is_read_too(tmp_path):
    rows = [{"id": "a", "question": "q?", "golden_answers": ["x"]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert read_tasks(tmp_path / "t.parquet") == [Task("a", ["q?"], [["x"]])]


GOOD = '{"id": "a", "question": "q?", "golden_answers": ["x"]}\n'


@pytest.mark.parametrize(
    ("content", "place", "complaint"),
    [
        (b"", "", "holds no records"),
        (b"\n \n", "", "holds no records"),
        (GOOD.encode() + b"not json\n", ":2", "not JSON"),
        (GOOD.encode() + b'["list"]\n', ":2", "one object a line"),
        (b"[" * 100_000 + b"\n", ":1", "not JSON"),
        (GOOD.encode() + b"\xff\xfe\n", ":2", "byte 1 is not UTF-8"),
        (b'{"id": "a"}\n', ":1", "has the fields id"),
        (b'{"id": "a", "prompt_text": "q", "label": "x"}\n', ":1", "has the fields id, prompt_text, label"),
        (b'{"question": "q?", "golden_answers": ["x"]}\n', ":1", "id is missing"),
        (b'{"id": "a", "question": "q?", "golden_answers": "x"}\n', ":1", "list of strings"),
        (b'{"id": "a", "question": "q?", "golden_answers": [1]}\n', ":1", "list of strings"),
        (b'{"id": "a", "question": "q?", "golden_answers": []}\n', ":1", "no accepted answer"),
        (b'{"id": "a", "question": " ", "golden_answers": ["x"]}\n', ":1", "blank"),
        (b'{"id": "a", "question": null, "golden_answers": ["x"]}\n', ":1", "question is"),
        (b'{"id": "a", "questions": ["q?"], "answers": ["x"]}\n', ":1", "list of strings"),
        (b'{"id": "a", "questions": ["q?"]}\n', ":1", "one list of strings per question"),
        (b'{"id": "a", "questions": ["q?", "r?"], "answers": [["x"]]}\n', ":1", "2 questions but 1"),
        ((GOOD + GOOD).encode(), ":2", "already stands at"),
    ],
)
def test_malformed_jsonl_names_file_line_and_cure(tmp_path, content, place, complaint):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=complaint) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}{place}")


def test_a_byte_order_mark_is_no_error(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_tasks(tmp_path / "t.jsonl")[0].id == "a"


def test_a_missing_file_a_folder_and_an_unknown_suffix(tmp_path):
    with pytest.raises(TaskError, match="no such file"):
        read_tasks(tmp_path / "gone.jsonl")
    with pytest.raises(TaskError, match="is a folder"):
        read_tasks(tmp_path)
    (tmp_path / "t.csv").write_text("a,b")
    with pytest.raises(TaskError, match=r"\.jsonl or \.parquet"):
        read_tasks(tmp_path / "t.csv")
    with pytest.raises(TaskError, match=r"\.jsonl or \.parquet"):
        write_tasks([BARE], tmp_path / "t.csv")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all" * 10])
def test_malformed_parquet(tmp_path, content):
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(TaskError, match="not a readable parquet file"):
        read_tasks(tmp_path / "t.parquet")


def test_truncated_parquet(tmp_path):
    write_tasks([ONE, TWO], tmp_path / "t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TaskError, match="not a readable parquet file"):
        read_tasks(tmp_path / "t.parquet")


def test_parquet_with_wrong_columns(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "label": [1]}), tmp_path / "t.parquet")
    with pytest.raises(TaskError, match="row 1 has the fields text, label"):
        read_tasks(tmp_path / "t.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "label": [1]}), tmp_path / "t.parquet")
    with pytest.raises(TaskError, match="lacks prompt"):
        read_tasks(tmp_path / "t.parquet")


def test_parquet_without_rows(tmp_path):
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "t.parquet")
    with pytest.raises(TaskError, match="holds no records"):
        read_tasks(tmp_path / "t.parquet")


def test_parquet_can_not_hold_a_lone_surrogate_and_says_so(tmp_path):
    with pytest.raises(TaskError, match=r"write \.jsonl"):
        write_tasks([Task("a", ["\ud800?"], [["x"]])], tmp_path / "t.parquet")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, suffix):
    path = tmp_path / f"tasks{suffix}"
    write_tasks([Task("old", ["Q?"], [["a"]])], path)

    def broken():
        yield Task("new", ["Q?"], [["a"]])
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_tasks(broken(), path)
    assert [task.id for task in read_tasks(path)] == ["old"]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_is_no_file_to_write(tmp_path):
    (tmp_path / "tasks.jsonl").mkdir()
    with pytest.raises(TaskError, match="is a folder"):
        write_tasks([Task("a", ["Q?"], [["a"]])], tmp_path / "tasks.jsonl")
