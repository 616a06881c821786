import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from memopd_env.errors import CorpusError
from memopd_env.retrieval import DenseRetriever, Passage
from memopd_env.retrieval import resources as machine
from memopd_env.retrieval.build import build
from memopd_env.retrieval.corpus import write_corpus
from memopd_env.retrieval.encoders import HashingEncoder
from memopd_env.retrieval.errors import BrokenIndexError, EncoderError, NotEnoughDiskError
from memopd_env.retrieval.kinds import KINDS

NOUNS = ["river", "bridge", "castle", "engine", "violin", "harbour", "novel", "planet", "glacier", "orchard"]
PLACES = ["Avel", "Brono", "Celta", "Dorin", "Ezmar", "Falun", "Gostar", "Helva", "Irmen", "Jalto"]


def passages(count):
    return [
        Passage(
            str(row),
            f"{PLACES[row % 10]} {NOUNS[row // 10 % 10]} {row}",
            f"The {NOUNS[row // 10 % 10]} number {row} stands in {PLACES[row % 10]}, founded by number {row * 7}.",
        )
        for row in range(count)
    ]


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path / "corpus.jsonl", passages(600))
    return tmp_path / "corpus.jsonl"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_built_opened_and_finds_what_exact_search_finds(tmp_path, corpus, kind):
    encoder = HashingEncoder(48)
    manifest = build(corpus, tmp_path / "index", encoder=encoder, kind=kind)
    retriever = DenseRetriever.open(tmp_path / "index")
    exact = DenseRetriever.from_passages(passages(600), encoder)
    queries = [f"the {NOUNS[row // 10 % 10]} number {row} in {PLACES[row % 10]}" for row in range(0, 600, 13)]
    found = [{p.id for p in result} for result in retriever.search(queries, 3)]
    expected = [{p.id for p in result} for result in exact.search(queries, 3)]
    shared = np.mean([len(a & b) / 3 for a, b in zip(found, expected, strict=True)])
    assert shared >= (0.99 if kind in ("flat", "flat-fp16") else 0.85)
    assert (manifest.kind, manifest.count, manifest.dim, len(retriever)) == (kind, 600, 48, 600)
    assert manifest.recall["value"] >= 0.9
    assert sorted(os.listdir(tmp_path / "index")) == sorted([*manifest.files, "manifest.json"])
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]


def test_an_ivf_index_put_together_on_disk_equals_one_built_in_memory(tmp_path, corpus):
    from memopd_env.retrieval.index import read_index
    from memopd_env.retrieval.indexing import write_vectors

    vectors = HashingEncoder(32).encode_passages([p.contents for p in passages(600)])
    for name, block in (("disk", 100), ("memory", 1000)):
        (tmp_path / name).mkdir()
        write_vectors(vectors, tmp_path / name, "ivf", lambda *_: None, block=block)
    (tmp_path / "disk").rename(tmp_path / "moved")
    found = [read_index(tmp_path / name / "index.faiss").search(vectors[:50], 5) for name in ("moved", "memory")]
    assert np.allclose(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])
    assert found[0][1].max() > 500
    assert sorted(os.listdir(tmp_path / "moved")) == ["index.faiss", "index.ivfdata"]


def test_a_shard_holds_its_rows_and_finds_them_by_their_own_ids(tmp_path, corpus):
    build(corpus, tmp_path / "shard", encoder=HashingEncoder(64), rows=(200, 300))
    retriever = DenseRetriever.open(tmp_path / "shard")
    assert len(retriever) == 100
    assert retriever.search([passages(600)[250].contents], 1)[0][0].id == "250"
    assert all(200 <= int(p.id) < 300 for p in retriever.search(["river"], 100)[0])


def test_a_bad_line_is_named_and_the_index_does_not_appear(tmp_path, corpus):
    lines = corpus.read_bytes().splitlines()
    lines[123] = b'{"id": "123", "contents": "\xff"}'
    corpus.write_bytes(b"\n".join(lines))
    with pytest.raises(CorpusError, match="line 124: not UTF-8"):
        build(corpus, tmp_path / "index", encoder=HashingEncoder(16), block=50)
    assert not (tmp_path / "index").exists()
    with pytest.raises(BrokenIndexError, match="an unfinished build"):
        DenseRetriever.open(tmp_path / "index")


def test_a_missing_corpus_leaves_nothing_behind(tmp_path):
    with pytest.raises(CorpusError, match="no corpus at"):
        build(tmp_path / "none.jsonl", tmp_path / "index", encoder=HashingEncoder(16))
    assert os.listdir(tmp_path) == []


def test_nan_from_the_encoder_names_the_lines(tmp_path, corpus):
    class Broken(HashingEncoder):
        def encode_passages(self, texts):
            vectors = super().encode_passages(texts)
            if any("number 77 " in text for text in texts):
                vectors[27, 3] = np.nan
            return vectors

    with pytest.raises(EncoderError, match=r"lines 51 to 100: .*NaN or infinity for text 28 of 50"):
        build(corpus, tmp_path / "index", encoder=Broken(16), block=50)
    assert not (tmp_path / "index").exists()


def test_an_existing_index_is_kept_unless_told_otherwise_and_replaced_whole(tmp_path, corpus):
    out = tmp_path / "index"
    build(corpus, out, encoder=HashingEncoder(16))
    with pytest.raises(BrokenIndexError, match="--overwrite"):
        build(corpus, out, encoder=HashingEncoder(16))
    build(corpus, out, encoder=HashingEncoder(24), kind="ivfpq", overwrite=True)
    assert DenseRetriever.open(out).manifest.dim == 24
    build(corpus, out, encoder=HashingEncoder(24), overwrite=True)
    assert "refine.faiss" not in os.listdir(out)
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]


def test_building_twice_gives_the_same_bytes(tmp_path, corpus):
    for name in ("a", "b"):
        build(corpus, tmp_path / name, encoder=HashingEncoder(16), kind="ivfpq")
    for name in ("index.faiss", "refine.faiss", "offsets.npy"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


BUILD = """
import sys, time
from memopd_env.retrieval.build import build
from memopd_env.retrieval.encoders import HashingEncoder

class Slow(HashingEncoder):
    def encode_passages(self, texts):
        time.sleep(float(sys.argv[3]) if len(texts) > 1 else 0)
        return super().encode_passages(texts)

def tell(stage, done, total):
    print(stage, done, total, flush=True)

build(sys.argv[1], sys.argv[2], encoder=Slow(32), block=20, progress=tell)
"""


def test_a_build_killed_in_the_middle_goes_on_where_it_was(tmp_path, corpus):
    out = tmp_path / "index"
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(corpus), str(out), "0.05"], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("encode") and int(line.split()[1]) >= 100:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists()
    noted = json.loads((tmp_path / ".index.building" / "state.json").read_text())["done"]
    assert 100 <= noted < 600
    # What a kill in the middle of a write leaves: part of a block behind the last note.
    with open(tmp_path / ".index.building" / "vectors.bin", "ab") as file:
        file.write(b"half a vector")
    second = subprocess.run(
        [sys.executable, "-c", BUILD, str(corpus), str(out), "0"], capture_output=True, text=True, check=True
    )
    assert f"encode {noted} 600" in second.stdout.splitlines()[0]
    build(corpus, tmp_path / "whole", encoder=HashingEncoder(32), block=20)
    assert (out / "index.faiss").read_bytes() == (tmp_path / "whole" / "index.faiss").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index", "whole"]


def test_an_unfinished_build_with_other_settings_is_not_mixed_up(tmp_path, corpus):
    def stop(stage, done, total):
        if done >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "index", encoder=HashingEncoder(16), block=50, progress=stop)
    with pytest.raises(BrokenIndexError, match="differs in encoder, probe"):
        build(corpus, tmp_path / "index", encoder=HashingEncoder(24))
    assert build(corpus, tmp_path / "index", encoder=HashingEncoder(16)).count == 600


def test_two_builds_of_one_folder_do_not_meet(tmp_path, corpus):
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(corpus), str(tmp_path / "index"), "0.05"], stdout=subprocess.PIPE, text=True
    )
    try:
        process.stdout.readline()
        with pytest.raises(BrokenIndexError, match="another process is building"):
            build(corpus, tmp_path / "index", encoder=HashingEncoder(32))
    finally:
        process.kill()
        process.wait()


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_encoded(tmp_path, corpus, monkeypatch):
    usage = type("usage", (), {"free": 10_000})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(NotEnoughDiskError, match=r"600 vectors of 64 numbers needs .* and 10\.0 kB is free"):
        build(corpus, tmp_path / "index", encoder=HashingEncoder(64))
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("limit", [10_000, 60_000])
def test_a_disk_that_fills_up_is_a_clear_error_and_the_build_can_go_on(tmp_path, corpus, limit):
    """A file size limit makes the kernel refuse to write, as a full disk does."""
    code = re.sub(
        r"^build",
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\nbuild",
        BUILD,
        flags=re.M,
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(tmp_path / "index"), "0"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "NotEnoughDiskError: the disk is full while building" in done.stderr
    assert not (tmp_path / "index").exists()
    assert build(corpus, tmp_path / "index", encoder=HashingEncoder(32)).count == 600
