import os
import subprocess
import sys

import faiss
import numpy as np
import pytest

from memopd_env.retrieval.errors import BrokenIndexError
from memopd_env.retrieval.index import VectorIndex, load_faiss, read_index, write_codes

VECTORS = np.random.default_rng(0).standard_normal((400, 32)).astype(np.float32)


def in_memory(name):
    index = faiss.index_factory(32, name, faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    index.add(VECTORS)
    return index


@pytest.mark.parametrize("name", ["Flat", "SQfp16", "SQ8"])
def test_a_file_written_as_a_stream_is_the_file_that_faiss_writes(tmp_path, name):
    trained = faiss.index_factory(32, name, faiss.METRIC_INNER_PRODUCT)
    trained.train(VECTORS)
    write_codes(tmp_path / "streamed", trained, (VECTORS[start : start + 90] for start in range(0, 400, 90)), 400)
    faiss.write_index(in_memory(name), str(tmp_path / "whole"))
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_stream_of_another_length_than_stated_is_noticed(tmp_path):
    with pytest.raises(BrokenIndexError):
        write_codes(tmp_path / "short", faiss.IndexFlatIP(32), [VECTORS[:10]], 400)


@pytest.mark.parametrize("batch", [1, 2, 40, 300])
def test_batches_of_any_size_give_the_same_rows(batch):
    index = VectorIndex(in_memory("Flat"))
    _, rows = index.search(VECTORS[:300], 3)
    expected = np.argsort(-(VECTORS[:300] @ VECTORS.T), axis=1)[:, :3]
    assert np.array_equal(rows, expected)
    for start in range(0, 300, batch):
        part = slice(start, min(start + batch, 300))
        assert np.array_equal(index.search(VECTORS[part], 3)[1], expected[part])


def test_asking_for_more_than_there_is_and_for_nothing():
    index = VectorIndex(in_memory("Flat"))
    assert index.search(VECTORS[:2], 1000)[1].shape == (2, 400)
    assert index.search(VECTORS[:2], 0)[1].shape == (2, 0)
    assert index.search(VECTORS[:0], 3)[1].shape == (0, 0)
    assert VectorIndex(faiss.IndexFlatIP(32)).search(VECTORS[:2], 3)[1].shape == (2, 0)


def test_refining_orders_candidates_by_the_better_vectors():
    refined = VectorIndex(in_memory("PQ4x4np"), in_memory("Flat"), {"candidates": 400})
    exact = VectorIndex(in_memory("Flat"))
    for got, expected in zip(refined.search(VECTORS[:20], 5), exact.search(VECTORS[:20], 5), strict=True):
        assert np.allclose(got, expected, atol=1e-5)


def test_rows_that_do_not_exist_are_left_out_of_refining():
    lists = in_memory("IVF20,PQ4x4np")
    index = VectorIndex(lists, in_memory("Flat"), {"nprobe": 1, "candidates": 400})
    scores, rows = index.search(VECTORS[:5], 300)
    assert (rows == -1).any()
    assert np.array_equal(rows == -1, np.isinf(scores))
    assert (rows[:, 0] >= 0).all()


@pytest.mark.parametrize("content", [b"", b"junk" * 100, b"IxFI", b"Iw"])
def test_what_is_not_an_index_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BrokenIndexError, match="not a readable FAISS index"):
        read_index(tmp_path / "file")
    with pytest.raises(BrokenIndexError, match="not a readable FAISS index"):
        read_index(tmp_path / "none")


def test_loading_faiss_leaves_the_environment_as_it_was():
    code = (
        "import os; before = dict(os.environ); from memopd_env.retrieval.index import load_faiss; load_faiss();"
        "assert dict(os.environ) == before"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert load_faiss().cvar.distance_compute_blas_threshold <= 1025
