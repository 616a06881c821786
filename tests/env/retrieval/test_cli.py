import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from memopd_env.cli import main
from memopd_env.retrieval import Passage
from memopd_env.retrieval.corpus import write_corpus

ROWS = [Passage(str(row), f"Title {row}", f"text about thing {row} and {row * 3}") for row in range(300)]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write_corpus(tmp_path / "corpus.jsonl", ROWS)
    return tmp_path / "corpus.jsonl"


def run(*arguments):
    return main(["retriever", *map(str, arguments)])


def test_build_query_and_verify(corpus, tmp_path, capsys):
    out = tmp_path / "index"
    assert run("build", "--corpus", corpus, "--out", out, "--encoder", "hash:64", "--kind", "ivfpq") == 0
    shown = capsys.readouterr()
    assert "300 vectors, ivfpq" in shown.out
    assert "recall@3" in shown.out
    assert run("query", "thing 123", "--index", out, "-k", "1") == 0
    assert "Title 123" in capsys.readouterr().out
    assert run("query", "thing 7", "thing 8", "--index", out, "-k", "1", "--hybrid", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["results"][0]["id"] for line in lines] == ["7", "8"]
    assert run("verify", "--index", out) == 0
    assert "sampled passages are found" in capsys.readouterr().out


def test_shards_of_one_corpus_answer_as_one(corpus, tmp_path, capsys):
    for name, rows in (("a", "0:100"), ("b", "100:300")):
        assert run("build", "--corpus", corpus, "--out", tmp_path / name, "--encoder", "hash:64", "--rows", rows) == 0
    capsys.readouterr()
    asked = (
        "query",
        "thing 50",
        "thing 250",
        "--index",
        tmp_path / "a",
        "--index",
        tmp_path / "b",
        "-k",
        "1",
        "--json",
    )
    assert run(*asked) == 0
    found = [json.loads(line)["results"][0]["id"] for line in capsys.readouterr().out.splitlines()]
    assert found == ["50", "250"]


def test_word_search_needs_no_index(corpus, capsys):
    assert run("query", "thing 42", "--corpus", corpus, "-k", "1") == 0
    assert "Title 42" in capsys.readouterr().out


def test_an_estimate_touches_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    assert run("build", "--estimate", "--passages", 21_000_000, "--dim", 768) == 0
    shown = capsys.readouterr().out
    for kind in ("flat", "flat-fp16", "sq8", "ivf", "ivfpq", "hnsw"):
        assert kind in shown
    assert "64.8 GB" in shown
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("build",), "give --corpus FILE and --out DIR"),
        (("build", "--corpus", "none.jsonl", "--out", "x", "--encoder", "hash:8"), "no corpus at none.jsonl"),
        (("build", "--corpus", "c", "--out", "x", "--encoder", "what"), "no encoder is called 'what'"),
        (("build", "--corpus", "c", "--out", "x", "--encoder", "hash:8", "--kind", "tree"), "no index kind"),
        (("build", "--corpus", "c", "--out", "x", "--encoder", "hash:8", "--rows", "5"), "give START:STOP"),
        (("build", "--estimate"), "needs --corpus FILE or --passages N"),
        (("query", "q"), "give --index DIR"),
        (("query", "q", "--index", "none"), "holds no index"),
        (("serve",), "give --index DIR"),
        (("verify", "--index", "none"), "holds no index"),
    ],
)
def test_bad_input_is_one_line_with_the_cure(arguments, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert reason in capsys.readouterr().err


def serving(*arguments, port):
    process = subprocess.Popen(
        [sys.executable, "-m", "memopd_env.cli", "retriever", *map(str, arguments), "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return process
        except httpx.TransportError:
            pass
        time.sleep(0.05)


def test_one_command_serves_reloads_on_sighup_and_ends_clean(corpus, tmp_path, port):
    out = tmp_path / "index"
    assert run("build", "--corpus", corpus, "--out", out, "--encoder", "hash:64") == 0
    process = serving("serve", "--index", out, port=port)
    try:
        url = f"http://127.0.0.1:{port}"
        ask = {"queries": ["thing 123"], "topk": 1, "return_scores": True}
        first = httpx.post(f"{url}/retrieve", json=ask).json()["result"][0][0]
        assert first["document"]["id"] == "123"
        write_corpus(corpus, [Passage(f"new-{p.id}", p.title, p.text) for p in ROWS])
        assert run("build", "--corpus", corpus, "--out", out, "--encoder", "hash:64", "--overwrite") == 0
        os.kill(process.pid, signal.SIGHUP)
        deadline = time.monotonic() + 20
        while httpx.post(f"{url}/retrieve", json=ask).json()["result"][0][0]["document"]["id"] != "new-123":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert run("query", "thing 9", "--url", url, "-k", "1") == 0
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()


def test_servers_of_shards_answer_behind_one_address(corpus, tmp_path, port, serve):
    from memopd_env.retrieval import DenseRetriever
    from memopd_env.retrieval.server import create_app

    for name, rows in (("a", "0:100"), ("b", "100:300")):
        assert run("build", "--corpus", corpus, "--out", tmp_path / name, "--encoder", "hash:64", "--rows", rows) == 0
    parts = [create_app(DenseRetriever.open(tmp_path / name)) for name in ("a", "b")]
    with serve(parts[0]) as first, serve(parts[1]) as second:
        process = serving("shard", first, second, port=port)
        try:
            ask = {"queries": ["thing 50", "thing 250"], "topk": 1, "return_scores": True}
            reply = httpx.post(f"http://127.0.0.1:{port}/retrieve", json=ask).json()["result"]
            assert [found[0]["document"]["id"] for found in reply] == ["50", "250"]
        finally:
            process.kill()
            process.wait()
