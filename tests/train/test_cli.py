"""``memopd train`` on files: from a corpus and questions to a trained student, and what it says when it cannot."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from memopd_env.cli import main
from memopd_train.progress import read_metrics

FACTS = {"Arno": "red", "Bela": "blue", "Cira": "green", "Dora": "white"}
TINY = ["--instructions", "terse", "--top-k", "1", "--use_cpu", "true"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    corpus, tasks = folder / "corpus.jsonl", folder / "train.jsonl"
    corpus.write_text(
        "".join(
            json.dumps({"id": str(number), "contents": f'"{name}"\nThe coat of {name} is {colour}.'}) + "\n"
            for number, (name, colour) in enumerate(FACTS.items())
        )
    )
    tasks.write_text(
        "".join(
            json.dumps({"id": name, "question": f"Which coat has {name}?", "golden_answers": [colour]}) + "\n"
            for name, colour in FACTS.items()
        )
    )
    return ["--tasks", str(tasks), "--corpus", str(corpus), *TINY]


@pytest.fixture(scope="module")
def student(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("sft")
    arguments = ["train", "sft", "--model", "new:tiny", "--out", str(out), "--max_steps", "3", "--logging_steps", "1"]
    assert main([*arguments, *world]) == 0
    return out / "model"


def test_a_new_model_learns_from_the_oracle(student):
    assert (student / "model.safetensors").is_file()
    assert [line["step"] for line in read_metrics(student.parent / "metrics.jsonl")] == [1, 2, 3]


def test_a_student_is_trained_and_the_run_resumed(world, student, tmp_path, capsys):
    out = tmp_path / "run"
    config = tmp_path / "run.yaml"
    config.write_text("episodes_per_iteration: 4\nmini_batch_episodes: 2\nmax_new_tokens: 8\niterations: 2\n")
    tasks = world[1]
    arguments = ["train", "memopd", "--model", str(student), "--teacher", str(student), "--out", str(out), *world]
    arguments += ["--config", str(config), "--eval-tasks", tasks, "--eval_every", "1"]
    assert main([*arguments, "--iterations", "1"]) == 0
    assert "model" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all("eval_em" in line for line in lines)


def test_wandb_gets_the_metrics_on_request_and_only_then(world, student, tmp_path):
    wandb = pytest.importorskip("wandb")
    code = "import sys; from memopd_env.cli import main; sys.exit(main(sys.argv[1:]))"
    run = [sys.executable, "-c", code, "train", "memopd", "--model", student, "--teacher", student, *world]
    run += ["--episodes_per_iteration", "2", "--mini_batch_episodes", "2", "--max_new_tokens", "4", "--iterations", "1"]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    for name, extra in (("quiet", []), ("told", ["--report_to", "wandb"])):
        subprocess.run([*run, "--out", tmp_path / name, *extra], env=environment, check=True, capture_output=True)
        records = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        assert len(records) == len(extra) / 2, wandb.__version__
    told = records[0].read_bytes()
    assert all(f"train/{name}".encode() in told for name in ("reward", "opd", "policy_loss", "em"))


def test_a_new_model_may_begin_with_exercises_alone(world, tmp_path):
    arguments = ["train", "sft", "--model", "new:tiny", "--vocab-size", "300", "--out", str(tmp_path / "run"), *world]
    arguments += ["--demonstrations", "0", "--word-exercises", "8", "--exercises", "4", "--max_steps", "1"]
    assert main(arguments) == 0
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert 256 < len(weights["lm_head.weight"]) < 320


@pytest.mark.parametrize(
    ("replaced", "content", "message"),
    [
        ("--tasks", None, "given.jsonl"),
        ("--tasks", "", "holds no records"),
        ("--tasks", '{"id": "a", "question": "q"}\n', ":1"),
        ("--corpus", '{"id": "0", "contents": "\\"A\\"\\nb"}\nnot json\n', "line 2"),
    ],
)
def test_bad_files_are_named_with_their_line(world, student, tmp_path, capsys, replaced, content, message):
    file = tmp_path / "given.jsonl"
    if content is not None:
        file.write_text(content)
    arguments = list(world)
    arguments[arguments.index(replaced) + 1] = str(file)
    run = ["train", "memopd", "--model", str(student), "--divergence", "none", "--out", str(tmp_path / "o")]
    assert main([*run, *arguments]) == 2
    error = capsys.readouterr().err
    assert "given.jsonl" in error
    assert message in error


def test_models_of_two_vocabularies_are_refused(world, student, tmp_path, capsys):
    arguments = ["train", "sft", "--model", "new:tiny", "--world", "tiny", "--demonstrations", "2", *TINY]
    assert main([*arguments, "--max_steps", "1", "--out", str(tmp_path / "other")]) == 0
    run = ["train", "memopd", "--model", str(student), "--teacher", str(tmp_path / "other" / "model")]
    assert main([*run, "--out", str(tmp_path / "run"), *world]) == 2
    assert "token id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memopd", "--model", "nowhere/at-all", "--out", "x"], "cannot load model 'nowhere/at-all'"),
        (["memopd", "--model", "new:tiny", "--out", "x", "--opd_coeff", "1"], "did you mean 'opd_coef'"),
        (["sft", "--model", "new:enormous", "--out", "x"], "the size must be one of tiny, small, medium"),
        (["options", "ppo"], "not of 'ppo'"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sft", "memopd", "options"])
def test_help_shows_an_example(command, capsys):
    assert main(["train", command, "--help"]) == 0
    assert f"Example: memopd train {command}" in " ".join(capsys.readouterr().out.split())


def test_all_options_are_listed(capsys):
    assert main(["train", "options"]) == 0
    shown = capsys.readouterr().out
    assert "--opd_coef" in shown
    assert "--teacher_state" in shown
