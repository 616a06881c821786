import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from memopd_env.errors import CorpusError
from memopd_env.retrieval import DenseRetriever, Passage, Retriever
from memopd_env.retrieval import dense as dense_module
from memopd_env.retrieval.build import build
from memopd_env.retrieval.corpus import write_corpus
from memopd_env.retrieval.encoders import HashingEncoder
from memopd_env.retrieval.errors import BrokenIndexError, EncoderError, NotEnoughMemoryError
from memopd_env.retrieval.resources import check_memory


class CountingEncoder(HashingEncoder):
    def __init__(self, dim):
        super().__init__(dim)
        self.encoded = []

    def encode_queries(self, texts):
        self.encoded.append(list(texts))
        return super().encode_queries(texts)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    rows = [Passage(str(row), f"Title {row}", f"about thing {row} and {row * 3}") for row in range(260)]
    write_corpus(folder / "corpus.jsonl", rows)
    build(folder / "corpus.jsonl", folder / "index", encoder=HashingEncoder(32), kind="ivfpq")
    return folder


@pytest.fixture
def copy(built, tmp_path):
    shutil.copytree(built, tmp_path / "copy")
    manifest = json.loads((tmp_path / "copy/index/manifest.json").read_text())
    manifest["corpus"]["path"] = str(tmp_path / "copy/corpus.jsonl")
    (tmp_path / "copy/index/manifest.json").write_text(json.dumps(manifest))
    return tmp_path / "copy"


def change(folder, **values):
    path = folder / "index/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_index_in_memory_answers_best_first(passages):
    retriever = DenseRetriever.from_passages(passages)
    assert isinstance(retriever, Retriever)
    found = retriever.search(["capital of France", "rock band"], 3)
    assert [result[0].title for result in found] == ["Paris", "The Who"]
    for result in found:
        assert [p.score for p in result] == sorted((p.score for p in result), reverse=True)
    assert retriever.search([], 3) == []
    assert retriever.search(["a"], 0) == [[]]
    assert len(retriever.search(["a"], 99)[0]) == len(passages)
    assert DenseRetriever.from_passages([]).search(["a"], 3) == [[]]


def test_equal_passages_come_in_the_order_of_rows():
    twins = [Passage(str(row), "same", "words") for row in range(9)]
    assert [p.id for p in DenseRetriever.from_passages(twins).search(["same"], 9)[0]] == [str(n) for n in range(9)]


def test_known_queries_are_not_encoded_again(passages):
    encoder = CountingEncoder(16)
    retriever = DenseRetriever.from_passages(passages, encoder)
    encoder.encoded.clear()
    first = retriever.search(["a", "b", "a"], 2)
    assert retriever.search(["b", "a", "c"], 2)[:2] == [first[1], first[0]]
    assert encoder.encoded == [["a", "b"], ["c"]]


def test_mapped_and_loaded_index_answer_alike_from_many_threads(built):
    queries = [f"thing {row}" for row in range(64)]
    mapped, loaded = (DenseRetriever.open(built / "index", mmap=mmap) for mmap in (True, False))
    expected = loaded.search(queries, 5)
    assert mapped.search(queries, 5) == expected
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda query: mapped.search([query], 5)[0], queries))
    assert [[p.id for p in result] for result in alone] == [[p.id for p in result] for result in expected]


def test_nan_from_an_encoder_of_the_users_own_is_an_error(passages):
    class Broken(HashingEncoder):
        def encode_queries(self, texts):
            return np.full((len(texts), self.dim), np.nan, np.float32)

    retriever = DenseRetriever.from_passages(passages, HashingEncoder(8))
    retriever.encoder = Broken(8)
    with pytest.raises(EncoderError, match="NaN or infinity"):
        retriever.search(["a"], 1)


@pytest.mark.parametrize("name", ["index.faiss", "refine.faiss", "offsets.npy"])
def test_a_cut_or_missing_file_is_refused(copy, name):
    path = copy / "index" / name
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(BrokenIndexError, match=rf"{name} has .* should have {len(data):,}: it was cut off"):
        DenseRetriever.open(copy / "index")
    path.unlink()
    with pytest.raises(BrokenIndexError, match=f"{name} is missing"):
        DenseRetriever.open(copy / "index")


def test_a_cut_index_with_a_matching_manifest_is_still_refused(copy):
    path = copy / "index/index.faiss"
    path.write_bytes(path.read_bytes()[:500])
    files = json.loads((copy / "index/manifest.json").read_text())["files"]
    change(copy, files={**files, "index.faiss": 500})
    with pytest.raises(BrokenIndexError, match="not a readable FAISS index"):
        DenseRetriever.open(copy / "index")


def test_a_file_name_in_a_manifest_cannot_leave_the_folder(copy):
    change(copy, files={"../corpus.jsonl": (copy / "corpus.jsonl").stat().st_size})
    with pytest.raises(BrokenIndexError, match="is missing"):
        DenseRetriever.open(copy / "index")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 1}', '{"format": 99, "corpus": {}}', '{"format": 1, "corpus": {"x": 1}}']
)
def test_a_malformed_manifest_is_refused(copy, content):
    (copy / "index/manifest.json").write_text(content)
    with pytest.raises(BrokenIndexError, match=r"malformed|format 99"):
        DenseRetriever.open(copy / "index")


def test_a_folder_without_index_says_how_to_build_one(tmp_path):
    with pytest.raises(BrokenIndexError, match="memopd retriever build"):
        DenseRetriever.open(tmp_path)


def test_a_missing_corpus_asks_for_its_path_and_takes_it(copy):
    (copy / "corpus.jsonl").rename(copy / "elsewhere.jsonl")
    with pytest.raises(CorpusError, match="--corpus"):
        DenseRetriever.open(copy / "index")
    assert len(DenseRetriever.open(copy / "index", corpus=copy / "elsewhere.jsonl")) == 260


def test_another_corpus_of_the_same_length_is_refused(copy):
    rows = [Passage(str(row), f"Other {row}", "x") for row in range(260)]
    write_corpus(copy / "corpus.jsonl", rows)
    with pytest.raises(CorpusError, match="shorter than when it was indexed"):
        DenseRetriever.open(copy / "index")
    write_corpus(copy / "corpus.jsonl", [Passage(p.id, p.title, "x" * 300) for p in rows])
    with pytest.raises(BrokenIndexError, match="other bytes"):
        DenseRetriever.open(copy / "index")


def test_another_number_of_passages_is_refused(copy):
    change(copy, corpus={**json.loads((copy / "index/manifest.json").read_text())["corpus"], "passages": 261})
    with pytest.raises(BrokenIndexError, match=r"corpus of 261 passages and .* has 260"):
        DenseRetriever.open(copy / "index")


def test_an_encoder_of_another_size_or_with_other_vectors_is_refused(copy):
    with pytest.raises(BrokenIndexError, match="vectors of 16 numbers and the index holds 32"):
        DenseRetriever.open(copy / "index", encoder="hash:16")

    class Other(HashingEncoder):
        def encode_passages(self, texts):
            return -super().encode_passages(texts)

    with pytest.raises(BrokenIndexError, match="other vectors than 'hash:32' gave"):
        DenseRetriever.open(copy / "index", encoder=Other(32))


def test_a_manifest_of_another_index_is_refused(copy):
    change(copy, count=100)
    with pytest.raises(BrokenIndexError, match=r"holds 260 vectors of 32 numbers and the manifest says 100 of 32"):
        DenseRetriever.open(copy / "index")


def test_an_index_larger_than_the_memory_is_refused_with_the_kinds_that_fit():
    with pytest.raises(NotEnoughMemoryError, match=r"needs 64\.5 GB .* 16\.0 GB is free: .*\(ivfpq\).*--allow-paging"):
        check_memory("flat", 768, 21_000_000, True, "wiki", free=16_000_000_000)
    with pytest.raises(NotEnoughMemoryError, match=r"\(sq8, ivfpq\)"):
        check_memory("flat", 768, 21_000_000, True, "wiki", free=17_000_000_000)
    with pytest.raises(NotEnoughMemoryError, match="use a larger machine or shards"):
        check_memory("hnsw", 768, 21_000_000, False, "wiki", free=1_000_000)
    check_memory("hnsw", 768, 21_000_000, True, "wiki", free=1_000_000)
    check_memory("ivfpq", 768, 21_000_000, False, "wiki", free=16_000_000_000)


def test_opening_asks_for_memory_first_unless_paging_is_allowed(built, monkeypatch):
    def refuse(*args):
        raise NotEnoughMemoryError("too small")

    monkeypatch.setattr(dense_module, "check_memory", refuse)
    with pytest.raises(NotEnoughMemoryError):
        DenseRetriever.open(built / "index")
    assert len(DenseRetriever.open(built / "index", allow_paging=True)) == 260


def test_a_gpu_that_is_not_there_is_said_with_the_cure(built):
    with pytest.raises(BrokenIndexError, match="faiss-gpu"):
        DenseRetriever.open(built / "index", gpu=True)
