import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_env.errors import CorpusError
from memopd_env.retrieval import Passage, SparseRetriever
from memopd_env.retrieval.corpus import Corpus, file_sha256, fingerprint, line_offsets, parse_line, write_corpus

PASSAGES = [Passage(str(row), f"Title {row}", f"text {row}\nsecond line é 東京") for row in range(100)]


@pytest.fixture
def path(tmp_path):
    write_corpus(tmp_path / "corpus.jsonl", PASSAGES)
    return tmp_path / "corpus.jsonl"


def test_rows_come_back_as_written(path):
    corpus = Corpus.open(path)
    assert len(corpus) == 100
    assert [corpus[row] for row in (0, 57, 99, -1)] == [PASSAGES[row] for row in (0, 57, 99, 99)]
    assert list(corpus) == PASSAGES
    assert corpus[10:13] == PASSAGES[10:13]


def test_a_row_outside_is_an_index_error(path):
    with pytest.raises(IndexError, match="row 100 of a corpus of 100"):
        Corpus.open(path)[100]


def test_the_title_is_split_from_the_text():
    passage = parse_line(rb'{"id": "7", "contents": "\"The \"Who\"\"\nA band.\nMore."}', "c", 1)
    assert (passage.id, passage.text) == ("7", "A band.\nMore.")
    assert parse_line(b'{"id": 3, "title": "T", "text": "x"}', "c", 1) == Passage("3", "T", "x")
    assert parse_line(b'{"id": "1", "contents": "no title"}', "c", 1) == Passage("1", "", "no title")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"id": "1", "contents": ', "not JSON"),
        (b"", "blank line"),
        (b"[1]", "not an object"),
        (b'{"contents": "x"}', '"id" is missing'),
        (b'{"id": null, "contents": "x"}', '"id" is missing'),
        (b'{"id": "1"}', '"contents" is missing'),
        (b'{"id": "1", "contents": 5}', '"contents" is missing'),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_number_and_reason(path, line, reason):
    lines = path.read_bytes().splitlines()
    lines[41] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    corpus = Corpus.open(path)
    with pytest.raises(CorpusError, match=f"corpus.jsonl, line 42: .*{reason}"):
        corpus[41]
    assert corpus[42] == PASSAGES[42]
    with pytest.raises(CorpusError, match="line 42"):
        SparseRetriever.from_corpus(path)


def test_a_missing_corpus_says_how_to_get_one(tmp_path):
    with pytest.raises(CorpusError, match="memopd world build"):
        Corpus.open(tmp_path / "none.jsonl")


def test_a_gzip_corpus_is_unpacked_once(tmp_path):
    write_corpus(tmp_path / "c.jsonl.gz", PASSAGES)
    assert list(Corpus.open(tmp_path / "c.jsonl.gz")) == PASSAGES
    unpacked = (tmp_path / "c.jsonl").stat().st_ino
    assert Corpus.open(tmp_path / "c.jsonl.gz")[5] == PASSAGES[5]
    assert (tmp_path / "c.jsonl").stat().st_ino == unpacked


def test_a_cut_gzip_corpus_is_refused_and_leaves_nothing(tmp_path):
    write_corpus(tmp_path / "c.jsonl.gz", PASSAGES)
    whole = (tmp_path / "c.jsonl.gz").read_bytes()
    (tmp_path / "c.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(CorpusError, match="not a whole gzip file"):
        Corpus.open(tmp_path / "c.jsonl.gz")
    assert os.listdir(tmp_path) == ["c.jsonl.gz"]


def test_offsets_are_kept_and_made_again_when_the_corpus_changes(path):
    Corpus.open(path)
    sidecar = path.with_name("corpus.jsonl.offsets.npy")
    before = sidecar.stat().st_ino
    Corpus.open(path)
    assert sidecar.stat().st_ino == before
    write_corpus(path, [Passage("x", "other", "words"), *PASSAGES])
    os.utime(sidecar, (0, 0))
    assert Corpus.open(path)[0].id == "x"


def test_a_damaged_offsets_file_is_made_again(path):
    Corpus.open(path)
    path.with_name("corpus.jsonl.offsets.npy").write_bytes(b"junk")
    assert Corpus.open(path)[99] == PASSAGES[99]


def test_an_interrupted_write_leaves_the_old_file(path):
    def explode():
        yield PASSAGES[0]
        raise KeyboardInterrupt

    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_corpus(path, explode())
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["corpus.jsonl"]


def test_an_empty_corpus_has_no_rows(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b"")
    assert list(Corpus.open(tmp_path / "c.jsonl")) == []


@given(st.lists(st.binary(max_size=6).filter(lambda line: line.strip() and b"\n" not in line)), st.integers(0, 3))
def test_offsets_cut_a_file_into_its_lines(tmp_path_factory, lines, blank):
    path = tmp_path_factory.mktemp("offsets") / "lines"
    path.write_bytes(b"\n".join(lines) + b"\n" * blank)
    offsets = line_offsets(path)
    data = path.read_bytes()
    cut = [data[int(a) : int(b)].rstrip(b"\n") for a, b in itertools.pairwise(offsets)]
    assert cut == lines


@given(st.text(), st.text())
@settings(deadline=None)
def test_any_text_survives_the_file(tmp_path_factory, title, text):
    passage = Passage("1", title, text)
    path = tmp_path_factory.mktemp("texts") / "c.jsonl"
    write_corpus(path, [passage])
    assert Corpus.open(path)[0] == Passage.from_contents("1", passage.contents)


def test_the_fingerprint_sees_a_change_of_size_or_of_a_small_file(path, tmp_path):
    before = fingerprint(path), file_sha256(path)
    data = path.read_bytes()
    path.write_bytes(data + b"\n")
    assert fingerprint(path) != before[0]
    path.write_bytes(data.replace(b"text 50", b"text 05"))
    assert fingerprint(path) != before[0]
    assert file_sha256(path) != before[1]
    path.write_bytes(data)
    assert (fingerprint(path), file_sha256(path)) == before


def test_readers_in_threads_see_their_own_rows(path):
    corpus = Corpus.open(path)
    rows = list(range(100)) * 20
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(corpus.__getitem__, rows)) == [PASSAGES[row] for row in rows]


def test_a_line_is_the_fields_own_form(path):
    assert json.loads(path.read_text().splitlines()[0]) == {
        "id": "0",
        "contents": '"Title 0"\ntext 0\nsecond line é 東京',
    }
