import pytest

from memopd_env.retrieval import DenseRetriever, Passage, Retriever
from memopd_env.retrieval.encoders import HashingEncoder
from memopd_env.retrieval.errors import BadReplyError, BrokenIndexError, RetrieverUnreachableError

pytest.importorskip("qdrant_client")
from memopd_env.retrieval.qdrant import QdrantRetriever

QUERIES = ["capital of France", "rock band", "Shakespeare"]


@pytest.fixture
def retriever(passages):
    retriever = QdrantRetriever(":memory:", encoder=HashingEncoder(64))
    assert retriever.upload(passages) == len(passages)
    return retriever


def test_it_answers_as_a_flat_index_does(retriever, passages):
    assert isinstance(retriever, Retriever)
    assert len(retriever) == len(passages)
    flat = DenseRetriever.from_passages(passages, HashingEncoder(64))
    for found, expected in zip(retriever.search(QUERIES, 3), flat.search(QUERIES, 3), strict=True):
        assert [(p.id, p.title, p.text) for p in found] == [(p.id, p.title, p.text) for p in expected]
        assert [p.score for p in found] == pytest.approx([p.score for p in expected], abs=1e-5)
    assert retriever.search([], 3) == []
    assert retriever.search(["a"], 0) == [[]]


def test_uploading_again_replaces_by_row(retriever, passages):
    retriever.upload([Passage("new", "Lyon", "The capital of France, says Lyon.")])
    assert len(retriever) == len(passages)
    assert retriever.search(["capital of France says Lyon"], 1)[0][0].id == "new"


def test_a_database_in_a_folder_outlives_the_process(tmp_path, passages):
    first = QdrantRetriever(str(tmp_path / "db"), encoder=HashingEncoder(32))
    first.upload(passages)
    expected = first.search(QUERIES, 2)
    first.close()
    second = QdrantRetriever(str(tmp_path / "db"), encoder=HashingEncoder(32))
    assert second.search(QUERIES, 2) == expected
    second.close()


def test_a_missing_collection_says_how_to_make_it():
    with pytest.raises(BrokenIndexError, match=r"upload\(\) first"):
        QdrantRetriever(":memory:").search(["a"], 1)


def test_another_encoder_is_refused(retriever, passages):
    retriever.encoder = HashingEncoder(16)
    with pytest.raises(BrokenIndexError, match=r"vectors of 64 numbers .* gives 16"):
        retriever.upload(passages)


def test_points_without_a_passage_are_a_bad_reply(retriever):
    retriever._client.set_payload("memopd", {"contents": 5}, points=[0, 1, 2, 3, 4])
    with pytest.raises(BadReplyError, match="carries no passage"):
        retriever.search(["capital"], 1)


def test_no_server_is_unreachable(port):
    with pytest.raises(RetrieverUnreachableError, match="is the server up"):
        QdrantRetriever(f"http://127.0.0.1:{port}", timeout=2).search(["a"], 1)
