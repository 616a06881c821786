"""The wheel: four import names, one command, and a gym that needs no torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("memopd_env", "memopd_train", "agents", "benchmarks")
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def run(*words, cwd, expect=0):
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy, so that nothing is left in the checkout and nothing stale in the wheel."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source, cwd=out)
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def stranger(wheel, tmp_path_factory):
    """An empty folder and an environment that holds the wheel with its base dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("stranger")
    run(sys.executable, "-m", "venv", "venv", cwd=folder)
    run(folder / "venv/bin/pip", "install", "--quiet", wheel, cwd=folder)
    return folder


@pytest.mark.slow
def test_wheel_holds_exactly_four_import_names(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    names = {name.split("/")[0] for name in files if ".dist-info/" not in name}
    assert names == {"memopd_env", "memopd_agents", "memopd_train", "memopd_benchmarks"}
    code = {name for name in files if name.endswith(".py")}
    homes = {"memopd_env": "", "memopd_train": "", "memopd_agents": "agents", "memopd_benchmarks": "benchmarks"}
    missing = {
        str(path.relative_to(ROOT / home))
        for package, home in homes.items()
        for path in (ROOT / home / package).rglob("*.py")
    } - code
    assert not missing, f"list the new sub-package in pyproject.toml: {sorted(missing)}"


@pytest.mark.slow
def test_wheel_installs_one_console_script(wheel):
    archive = zipfile.ZipFile(wheel)
    [entry_points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    scripts = archive.read(entry_points).decode().split("[console_scripts]")[1].split("[")[0]
    assert scripts.split("\n")[1:2] == ["memopd = memopd_env.cli:main"] and scripts.count("=") == 1


@pytest.mark.slow
def test_gym_alone_brings_no_torch_and_scores_a_strangers_agent(stranger):
    python, memopd = stranger / "venv/bin/python", stranger / "venv/bin/memopd"
    absent = "import importlib.util as u; print([n for n in ('torch', 'faiss', 'transformers') if u.find_spec(n)])"
    assert run(python, "-c", absent, cwd=stranger) == "[]\n"
    source = re.search(r'^```python title="scout.py"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    assert source
    (stranger / "scout.py").write_text(source[1])
    shown = run(memopd, "eval", "--agent", "scout:scout", "--episodes", 20, "--out", "runs/scout", cwd=stranger)
    assert "scout:scout" in shown and (stranger / "runs/scout/result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [("train", "sft", "--out", "x"), ("quickstart",)])
def test_a_missing_extra_is_one_line_with_the_cure(stranger, words):
    shown = run(stranger / "venv/bin/memopd", *words, cwd=stranger, expect=2)
    assert shown.count("\n") == 1 and "pip install 'memopd[train]'" in shown
