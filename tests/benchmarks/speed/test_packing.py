"""The packing benchmark runs and its figures belong together; times are not tested."""

from __future__ import annotations

import json
from pathlib import Path

from memopd_benchmarks.speed.packing import main


def test_every_layout_computes_the_same_and_sharing_computes_least(tmp_path: Path) -> None:
    output = tmp_path / "packing.json"
    size = ["--questions", "2", "--tasks", "1", "--rollouts", "2", "--layers", "1", "--hidden", "32", "--repeats", "1"]
    main([*size, "--device", "cpu", "--output", str(output)])
    report = json.loads(output.read_text())
    layouts = report["layouts"]
    assert all(row["error"] < 1e-4 for row in layouts.values())
    assert layouts["not shared, varlen"]["tokens"] == report["raw_tokens"] <= layouts["padded calls, sdpa"]["tokens"]
    assert layouts["shared, varlen"]["tokens"] == layouts["shared, sdpa"]["tokens"] < report["raw_tokens"]
