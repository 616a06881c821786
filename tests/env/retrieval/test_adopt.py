import json

import faiss
import numpy as np
import pytest

from memopd_env.retrieval import DenseRetriever, Passage
from memopd_env.retrieval.adopt import adopt, kind_of, verify
from memopd_env.retrieval.build import build
from memopd_env.retrieval.corpus import write_corpus
from memopd_env.retrieval.encoders import HashingEncoder
from memopd_env.retrieval.errors import BrokenIndexError
from memopd_env.retrieval.kinds import KINDS, factory

ROWS = [Passage(str(row), f"Title {row}", f"text about thing {row} and {row * 3}") for row in range(300)]


@pytest.fixture
def encoder():
    return HashingEncoder(32)


@pytest.fixture
def files(tmp_path, encoder):
    write_corpus(tmp_path / "corpus.jsonl", ROWS)
    index = faiss.IndexFlatIP(32)
    index.add(encoder.encode_passages([passage.contents for passage in ROWS]))
    faiss.write_index(index, str(tmp_path / "bare.index"))
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_recognised(kind):
    assert kind_of(faiss.index_factory(32, factory(kind, 32, 5000), faiss.METRIC_INNER_PRODUCT)) == kind


def test_indexes_that_cannot_be_served_are_refused():
    with pytest.raises(BrokenIndexError, match="inner product"):
        kind_of(faiss.IndexFlatL2(8))
    with pytest.raises(BrokenIndexError, match="none of the kinds"):
        kind_of(faiss.index_factory(32, "PQ8", faiss.METRIC_INNER_PRODUCT))


def test_a_bare_file_becomes_an_index_folder_and_stays_where_it_was(files, encoder):
    adopt(files / "bare.index", files / "corpus.jsonl", files / "index", encoder=encoder)
    assert DenseRetriever.open(files / "index").search(["thing 123"], 1)[0][0].id == "123"
    assert (files / "bare.index").samefile(files / "index/index.faiss")
    with pytest.raises(BrokenIndexError, match="holds an index already"):
        adopt(files / "bare.index", files / "corpus.jsonl", files / "index", encoder=encoder)


def test_a_corpus_of_another_length_is_refused(files, encoder):
    write_corpus(files / "other.jsonl", ROWS[:-1])
    with pytest.raises(BrokenIndexError, match=r"300 vectors and .*299 passages"):
        adopt(files / "bare.index", files / "other.jsonl", files / "index", encoder=encoder)


def test_an_encoder_of_another_size_is_refused(files):
    with pytest.raises(BrokenIndexError, match="vectors of 16 numbers and the index holds 32"):
        adopt(files / "bare.index", files / "corpus.jsonl", files / "index", encoder=HashingEncoder(16))
    assert not (files / "index/manifest.json").exists()


def test_a_good_folder_is_verified(files, encoder):
    build(files / "corpus.jsonl", files / "index", encoder=encoder, kind="ivfpq")
    checked = verify(files / "index", encoder=encoder)
    assert len(checked) == 5
    assert "300 passages are well formed" in checked


def test_one_changed_letter_is_found_by_verifying(files, encoder):
    build(files / "corpus.jsonl", files / "index", encoder=encoder)
    manifest = json.loads((files / "index/manifest.json").read_text())
    data = (files / "corpus.jsonl").read_bytes()
    (files / "corpus.jsonl").write_bytes(data.replace(b"thing 77 ", b"thing 78 "))
    # As if the change had fallen between the samples of the quick hash.
    from memopd_env.retrieval.corpus import fingerprint

    manifest["corpus"]["fingerprint"] = fingerprint(files / "corpus.jsonl")
    (files / "index/manifest.json").write_text(json.dumps(manifest))
    assert len(DenseRetriever.open(files / "index")) == 300
    with pytest.raises(BrokenIndexError, match="other bytes"):
        verify(files / "index")


def test_an_index_in_another_order_than_its_corpus_is_found_by_verifying(files, encoder):
    index = faiss.IndexFlatIP(32)
    vectors = encoder.encode_passages([passage.contents for passage in ROWS])
    index.add(np.ascontiguousarray(vectors[::-1]))
    faiss.write_index(index, str(files / "bare.index"))
    adopt(files / "bare.index", files / "corpus.jsonl", files / "index", encoder=encoder)
    with pytest.raises(BrokenIndexError, match="sampled passages are found by their own vectors"):
        verify(files / "index", encoder=encoder)
