"""The site builds without a warning, with the options of training in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_site_builds_strictly_and_lists_every_option(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'memopd[docs]'")
    from memopd_train.config import MemOPDConfig, own_options

    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "training.html").read_text(encoding="utf-8")
    assert [name for name, _, _ in own_options(MemOPDConfig) if f"<code>{name}</code>" not in page] == []
    assert ":class:" not in (tmp_path / "reference.html").read_text(encoding="utf-8")
