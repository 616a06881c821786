"""The loss benchmark compares like with like: both variants compute the same loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memopd_benchmarks.speed.loss_memory import main


@pytest.mark.slow
def test_both_variants_compute_the_same_loss_and_the_fused_one_needs_less(tmp_path: Path) -> None:
    output = tmp_path / "loss_memory.json"
    main(["--tokens", "512", "--vocab", "20000", "--hidden", "32", "--device", "cpu", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert rows["fused"]["loss"] == pytest.approx(rows["naive"]["loss"], rel=1e-4)
    assert rows["fused"]["peak_mib"] < rows["naive"]["peak_mib"]
