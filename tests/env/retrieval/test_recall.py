import numpy as np
import pytest

from memopd_env.retrieval.index import VectorIndex, read_index
from memopd_env.retrieval.indexing import write_vectors
from memopd_env.retrieval.recall import exact, recall, tune

RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((3000, 24)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)
QUERIES = np.ascontiguousarray(VECTORS[::60] + 0.1 * RNG.standard_normal((50, 24)).astype(np.float32))


def test_exact_search_in_blocks_is_a_full_sort():
    scores, rows = exact(VECTORS, QUERIES, 5, block=701)
    expected = np.argsort(-(QUERIES @ VECTORS.T), axis=1)[:, :5]
    assert np.array_equal(rows, expected)
    assert np.allclose(scores, np.take_along_axis(QUERIES @ VECTORS.T, expected, 1), atol=1e-5)


def test_exact_search_of_fewer_rows_than_asked_for_pads():
    _, rows = exact(VECTORS[:2], QUERIES, 5)
    assert np.array_equal(rows[:, 2:], np.full((50, 3), -1))


def test_recall_is_the_share_of_rows_that_reach_the_exact_kth():
    scores, rows = exact(VECTORS, QUERIES, 3)
    assert recall(VECTORS, QUERIES, scores[:, -1], rows) == 1.0
    worse = rows.copy()
    worse[:, 0] = np.argmin(QUERIES @ VECTORS.T, axis=1)
    assert recall(VECTORS, QUERIES, scores[:, -1], worse) == pytest.approx(2 / 3)
    assert recall(VECTORS, QUERIES, scores[:, -1], np.full_like(rows, -1)) == 0.0


def test_a_tie_counts_as_found():
    twins = np.repeat(VECTORS[:10], 4, axis=0)
    scores, _ = exact(twins, VECTORS[:10], 3)
    rows = np.arange(40).reshape(10, 4)[:, 1:]
    assert recall(twins, VECTORS[:10], scores[:, -1], rows) == 1.0


@pytest.mark.parametrize("kind", ["ivf", "ivfpq", "hnsw"])
def test_tuning_takes_the_least_effort_that_suffices(tmp_path, kind):
    write_vectors(VECTORS, tmp_path, kind, lambda *_: None)
    found, settings = tune(tmp_path, VECTORS, QUERIES, kind, 0.8, lambda *_: None)
    assert found["value"] >= 0.8
    assert all(one["recall"] < 0.8 for one in found["tried"][:-1])
    assert settings.items() <= found["tried"][-1].items()
    more, _ = tune(tmp_path, VECTORS, QUERIES, kind, 2.0, lambda *_: None)
    assert more["value"] == max(one["recall"] for one in more["tried"])


def test_refining_lifts_recall(tmp_path):
    write_vectors(VECTORS, tmp_path, "ivfpq", lambda *_: None)
    scores, _ = exact(VECTORS, QUERIES, 3)
    search = {"nprobe": 64, "candidates": 64}
    refine = read_index(tmp_path / "refine.faiss")
    values = [
        recall(
            VECTORS,
            QUERIES,
            scores[:, -1],
            VectorIndex(read_index(tmp_path / "index.faiss"), part, search).search(QUERIES, 3)[1],
        )
        for part in (None, refine)
    ]
    assert values[1] > values[0] + 0.1
