"""memopd data: compose, convert, inspect."""

import json

import pytest

from memopd_env.cli import main
from memopd_env.tasks import read_tasks


@pytest.fixture
def qa(tmp_path):
    path = tmp_path / "qa.jsonl"
    rows = [{"id": f"q{i}", "question": f"[red]Question {i}\x1b[0m?", "golden_answers": [f"a{i}"]} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_compose_then_convert_then_inspect(qa, tmp_path, capsys):
    out = tmp_path / "tasks"
    arguments = [str(qa), "--out", str(out), "-n", "2", "--share", "train=1", "--share", "test=1", "--count", "train=7"]
    assert main(["data", "compose", *arguments]) == 0
    assert len(read_tasks(out / "train.jsonl")) == 7
    assert main(["data", "convert", str(out / "train.jsonl"), str(tmp_path / "t.parquet")]) == 0
    assert read_tasks(tmp_path / "t.parquet") == read_tasks(out / "train.jsonl")
    assert main(["data", "inspect", str(tmp_path / "t.parquet"), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "[red]Question" in shown and "\x1b[0m" not in shown


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--share", "train=much"], "train=much"),
        (["--share", "train=0"], "greater than 0"),
        (["--format", "csv"], "csv"),
        (["-n", "99"], "different questions"),
        (["--split-file", "gone.json"], "gone.json"),
        (["--count", "train=inf"], "train=inf"),
        (["--count", "train=2.5"], "train=2.5"),
        (["--count", "train=-3"], "at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_one_line(qa, tmp_path, capsys, arguments, complaint):
    assert main(["data", "compose", str(qa), "--out", str(tmp_path / "o"), *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_the_name_of_a_folder_is_text_and_never_markup_or_an_escape(qa, tmp_path, capsys):
    out = tmp_path / "[/bold] \x1b[2J"
    assert main(["data", "compose", str(qa), "--out", str(out), "--share", "all=1"]) == 0
    shown = capsys.readouterr().out
    assert "[/bold]" in "".join(shown.split("\n")) and "\x1b" not in shown
