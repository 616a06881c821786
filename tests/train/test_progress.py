"""The metrics file of a resumed run is that of a run that was never stopped."""

import json

from memopd_train.progress import MetricsLog, Progress, progress_line, read_metrics


def test_lines_past_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write({"step": step, "seconds": step * 10.0})
    log.close()
    resumed = MetricsLog(path, resume_step=2)
    assert resumed.seconds_before == 20.0
    assert resumed.last["step"] == 2
    resumed.write({"step": 3, "seconds": 31.0})
    resumed.close()
    assert [(line["step"], line["seconds"]) for line in read_metrics(path)] == [(1, 10.0), (2, 20.0), (3, 31.0)]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_the_progress_line_shows_stage_and_news(capsys):
    with progress_line("memopd") as show:
        show(Progress("play", 1, 2, 3.0, {"reward": 0.25}))
    shown = capsys.readouterr().out
    assert "memopd: play" in shown
    assert "reward 0.25" in shown
