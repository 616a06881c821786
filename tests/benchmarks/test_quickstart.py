import json
import os
import signal
import subprocess
import sys
import time

import pytest

from memopd_benchmarks.quickstart import Quickstart, Recipe, run_quickstart
from memopd_env.errors import ConfigError
from memopd_env.tasks.io import read_tasks

SMALL = Recipe(
    exercises=20, demonstrations=30, base_steps=4, teacher_steps=4, student_steps=4, iterations=2, episodes=4,
    test_tasks={2: 3},
)  # fmt: skip


def test_held_out_entities_are_in_no_training_text(tmp_path):
    quickstart = Quickstart(tmp_path, recipe=SMALL)
    held_out = {t for task in quickstart.tasks("test", 2, 500) for titles in task.entities for t in titles}
    read = quickstart.exercises() + quickstart.demonstrations
    words = set()
    for episode in read:
        for call in episode.calls:
            text = quickstart.tokenizer.decode(call.prompt_ids + call.action_ids)
            words |= {word.strip(" ?:;,.") for word in text.replace("<", " ").replace(">", " ").split()}
    assert len(held_out) > 400
    assert not held_out & words


def test_another_recipe_or_seed_in_the_same_folder_is_refused(tmp_path):
    (tmp_path / "quickstart.json").write_text(json.dumps({"seed": 1, "recipe": {}, "seconds": {}}))
    with pytest.raises(ConfigError, match="another --out"):
        run_quickstart(tmp_path, seed=2, recipe=SMALL)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"seed": 0, "recipe": {}, "seconds": 3}'])
def test_a_damaged_record_of_the_folder_is_named(tmp_path, content):
    (tmp_path / "quickstart.json").write_text(content)
    with pytest.raises(ConfigError, match=r"quickstart\.json is damaged"):
        run_quickstart(tmp_path, recipe=SMALL)


def test_a_damaged_model_is_named_with_the_folder_to_remove(tmp_path):
    (tmp_path / "base" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"remove \S*base and run the same command again"):
        run_quickstart(tmp_path, recipe=SMALL)


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_interrupted(tmp_path):
    out = tmp_path / "quickstart"
    command = [sys.executable, "-c", "from memopd_env.cli import main; raise SystemExit(main())"]
    command += ["quickstart", "--smoke", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 200
    while not (out / "student" / "model").exists() and time.monotonic() < deadline:
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 130, output
    assert "run the same command again" in output

    written = (out / "base" / "model" / "model.safetensors").stat().st_mtime_ns
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert second.returncode == 0, second.stdout + second.stderr
    assert (out / "base" / "model" / "model.safetensors").stat().st_mtime_ns == written
    assert "base: done" in " ".join(second.stdout.split())

    result = json.loads((out / "result.json").read_text())
    assert {entry["agent"] for entry in result["results"]} == {"oracle", "random", "student", "teacher", "memopd"}
    oracle = [entry for entry in result["results"] if entry["agent"] == "oracle"]
    assert all(entry["metrics"]["em"]["mean"] == entry["num_questions"][0] for entry in oracle)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((out / "episodes.jsonl").read_text().splitlines()) == 8
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_tasks(out / "world" / "test-q2.jsonl")) == 8
