"""The memopd command: lazy, and one line where something is wrong."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint

import pytest

from memopd_env import cli


def test_help_lists_the_sub_commands_without_importing_any(capsys):
    code = (
        "import sys; from memopd_env.cli import main; status = main(['--help'])\n"
        "lazy = ('typer', 'rich', 'memopd_env.commands', 'memopd_agents')\n"
        "print(status, [name for name in sys.modules if name.startswith(lazy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    for name in ("data", "world", "doctor"):
        assert f"  {name} " in done.stdout


def test_without_arguments_it_is_help(capsys):
    assert cli.main([]) == 0
    assert "usage: memopd" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("memopd 0.")


def test_an_unknown_sub_command_is_one_line_with_the_choices(capsys):
    assert cli.main(["dance"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "'dance'" in line and "doctor" in line


def test_an_error_of_ours_is_one_line_and_status_two(tmp_path, capsys):
    assert cli.main(["data", "inspect", str(tmp_path / "gone.jsonl")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no such file" in error and "Traceback" not in error


def test_usage_errors_and_help_have_their_usual_status(capsys):
    assert cli.main(["data", "compose"]) == 2
    assert cli.main(["data", "compose", "--help"]) == 0
    assert "Example" in capsys.readouterr().out


@pytest.fixture
def entry(monkeypatch, tmp_path):
    """Install a sub-command ``extra`` from source text."""

    def install(source):
        (tmp_path / "extra_command.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "extra_command", raising=False)
        point = EntryPoint("extra", "extra_command:run", cli.GROUP)
        monkeypatch.setattr(cli, "entry_points", lambda group: [point])

    return install


def test_a_missing_extra_says_what_to_install(entry, capsys, monkeypatch):
    monkeypatch.setitem(cli.EXTRAS, "no_such_module", "train")
    entry("import no_such_module\n")
    assert cli.main(["extra"]) == 2
    assert "needs no_such_module: pip install 'memopd[train]'" in capsys.readouterr().err


def test_a_missing_extra_that_is_noticed_late_is_named_too(entry, capsys, monkeypatch):
    monkeypatch.setitem(cli.EXTRAS, "no_such_module", "train")
    entry("def run() -> None:\n    import no_such_module\n")
    assert cli.main(["extra"]) == 2
    assert "needs no_such_module: pip install 'memopd[train]'" in capsys.readouterr().err


def test_a_command_of_ours_that_is_not_installed_says_so(entry, capsys):
    entry("import memopd_env.not_there\n")
    assert cli.main(["extra"]) == 2
    assert "not part of this installation" in capsys.readouterr().err


def test_a_bug_is_not_hidden(entry):
    entry("import nonsense_module_of_someone\n")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["extra"])


def test_a_plain_function_is_a_sub_command(entry, capsys):
    entry("def run(number: int = 1) -> None:\n    '''Count.'''\n    import sys; sys.stdout.write(str(number + 1))\n")
    assert cli.main(["extra", "--number", "41"]) == 0
    assert capsys.readouterr().out == "42"


def test_control_characters_of_a_message_do_not_reach_the_terminal(entry, capsys):
    entry("from memopd_env.errors import ConfigError\ndef run() -> None:\n    raise ConfigError('a\\x1b[2Jb\\nc')\n")
    assert cli.main(["extra"]) == 2
    assert capsys.readouterr().err == "memopd: a\\x1b[2Jb c\n"


def test_an_interrupt_has_its_usual_status(entry, capsys):
    entry("def run() -> None:\n    raise KeyboardInterrupt\n")
    assert cli.main(["extra"]) == 130


def test_a_terminated_evaluation_unwinds_and_goes_on_where_it_stopped(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef slow(observation, info):\n    time.sleep(0.2)\n    return '<answer>a; b</answer>'\n"
    )
    run = [sys.executable, "-m", "memopd_env.cli", "eval", "--agent", "slow:slow", "--episodes", "12", "--workers", "1"]
    run += ["--out", "run"]
    process = subprocess.Popen(run, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    episodes = tmp_path / "run" / "episodes.jsonl"
    while not (episodes.exists() and len(episodes.read_bytes().splitlines()) >= 2):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1].splitlines()[-1] == "memopd: terminated"
    assert process.returncode == 143
    kept = episodes.read_bytes()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["wall_time_s"] > 0
    assert subprocess.run(run, cwd=tmp_path, capture_output=True).returncode == 0
    assert episodes.read_bytes().startswith(kept) and len(episodes.read_bytes().splitlines()) == 12


@pytest.mark.parametrize(
    ("number", "cure"), [(errno.ENOSPC, "make room"), (errno.EACCES, "permissions"), (errno.EIO, "")]
)
def test_what_the_operating_system_refuses_is_one_line_that_names_the_file(entry, capsys, number, cure):
    entry(f"import os\ndef run() -> None:\n    raise OSError({number}, os.strerror({number}), '/some/file')\n")
    assert cli.main(["extra"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"memopd: /some/file: {os.strerror(number)}") and line.count("\n") == 1 and cure in line


def test_a_refusal_without_a_file_still_says_something(entry, capsys):
    entry("def run() -> None:\n    raise OSError('the socket is gone')\n")
    assert cli.main(["extra"]) == 2
    assert capsys.readouterr().err == "memopd: the socket is gone\n"
