import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_env.errors import CorpusError
from memopd_env.retrieval import Passage, Retriever, SparseRetriever
from memopd_env.retrieval.sparse import top_rows, words

PASSAGES = [
    Passage("0", "The Who", "An English rock band from London."),
    Passage("1", "X", "A letter, and also a band."),
    Passage("2", "Beyoncé", "A singer from Houston."),
    Passage("3", "東京", "日本の首都である。"),
    Passage("4", "Łódź", "A city in Poland with a river."),
    Passage("5", "U2", "A band from Dublin."),
]


@pytest.fixture(scope="module")
def retriever():
    return SparseRetriever.from_passages(PASSAGES)


@pytest.mark.parametrize(
    ("query", "id"),
    [
        ("The Who", "0"),
        ("who", "0"),
        ("x", "1"),
        ("beyonce", "2"),
        ("BEYONCÉ", "2"),
        ("Beyonce\u0301", "2"),
        ("日本", "3"),
        ("東京", "3"),
        ("ŁÓDŹ", "4"),
        ("u2", "5"),
        ("Ｕ２", "5"),
    ],
)
def test_a_name_is_found_in_any_script_case_and_form(retriever, query, id):
    assert retriever.search([query], 1)[0][0].id == id


def test_title_and_text_are_searched_together(retriever):
    assert {passage.id for passage in retriever.search(["who london"], 5)[0]} == {"0"}


def test_a_query_without_known_words_finds_nothing(retriever):
    assert retriever.search(["", "   ", "zzz qqq", "?!", "\x00", "\ud800"], 3) == [[]] * 6


def test_results_come_best_first_and_at_most_k(retriever):
    found = retriever.search(["a band from dublin"], 3)[0]
    assert len(found) == 3
    assert found[0].id == "5"
    assert [passage.score for passage in found] == sorted((p.score for p in found), reverse=True)
    assert all(passage.score > 0 for passage in found)


def test_k_larger_than_the_corpus_and_k_zero_are_fine(retriever):
    assert len(retriever.search(["a"], 1000)[0]) < len(PASSAGES)
    assert retriever.search(["band"], 0) == [[]]


def test_equal_scores_are_ordered_by_row():
    twins = [Passage(str(row), "twin", "the same words") for row in range(50)]
    found = SparseRetriever.from_passages(twins).search(["same twin"], 10)[0]
    assert [passage.id for passage in found] == [str(row) for row in range(10)]


def test_the_order_of_the_words_of_a_query_does_not_matter(retriever):
    spoken = ["an", "english", "rock", "band", "from", "london", "with", "a", "river"]
    expected = retriever.search([" ".join(spoken)], 6)
    random.Random(0).shuffle(spoken)
    assert retriever.search([" ".join(spoken)], 6) == expected


def test_an_empty_corpus_and_a_corpus_without_words_find_nothing():
    assert SparseRetriever.from_passages([]).search(["a"], 3) == [[]]
    assert SparseRetriever.from_passages([Passage("0", "", "?!")]).search(["a"], 3) == [[]]


def test_a_query_of_megabytes_is_cut_and_answered(retriever):
    assert retriever.search(["who " + "band " * 2_000_000], 1)[0][0].id in {"0", "1", "5"}


def test_it_is_a_retriever_and_knows_its_size(retriever):
    assert isinstance(retriever, Retriever)
    assert len(retriever) == len(PASSAGES)


def test_threads_get_the_answers_of_a_single_caller(retriever):
    queries = ["the who", "band", "a singer", "東京", "river in poland"] * 20
    alone = [retriever.search([query], 3) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: retriever.search([query], 3), queries)) == alone


@given(st.lists(st.text(), max_size=5), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_any_text_is_answered_in_shape(queries, k):
    found = SparseRetriever.from_passages(PASSAGES).search(queries, k)
    assert len(found) == len(queries)
    assert all(len(passages) <= k for passages in found)


@given(st.lists(st.text(alphabet="ab ", max_size=12), min_size=1, max_size=20), st.text(alphabet="ab ", max_size=6))
@settings(max_examples=100, deadline=None)
def test_exactly_the_passages_that_share_a_word_are_found(texts, query):
    retriever = SparseRetriever.from_passages([Passage(str(row), "", text) for row, text in enumerate(texts)])
    expected = {str(row) for row, text in enumerate(texts) if set(words(text)) & set(words(query))}
    assert {passage.id for passage in retriever.search([query], len(texts))[0]} == expected


@given(st.lists(st.integers(-2, 5), max_size=40), st.integers(1, 10))
def test_top_rows_is_a_full_sort_by_score_then_row(values, k):
    scores = np.array(values, np.float32)
    expected = sorted((row for row in range(len(values)) if values[row] > 0), key=lambda row: (-values[row], row))[:k]
    assert top_rows(scores, k).tolist() == expected


def test_importing_the_package_and_searching_loads_no_heavy_library():
    code = (
        "import sys; from memopd_env.retrieval import Passage, SparseRetriever;"
        "SparseRetriever.from_passages([Passage('0', 'a', 'b')]).search(['a'], 1);"
        "loaded = {'faiss', 'fastapi', 'torch', 'transformers'} & set(sys.modules);"
        "sys.exit(', '.join(loaded) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_empty_corpus_file_is_refused(tmp_path):
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(CorpusError, match="holds no passages"):
        SparseRetriever.from_corpus(tmp_path / "corpus.jsonl")
