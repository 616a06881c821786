import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_env.retrieval.errors import BrokenIndexError
from memopd_env.retrieval.gpu import fill, shard_ranges, sharded_flat, to_gpus

VECTORS = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)


@given(st.integers(0, 1000), st.integers(1, 16))
def test_ranges_cover_all_rows_once_and_are_even(count, shards):
    ranges = shard_ranges(count, shards)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in ranges]
    assert len(sizes) == shards and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["Flat", "SQfp16", "SQ8"])
def test_shards_filled_in_blocks_answer_as_one_index(name):
    """The spreading of rows over devices, with flat indexes on the CPU in the devices' place."""
    source = faiss.index_factory(16, name, faiss.METRIC_INNER_PRODUCT)
    source.train(VECTORS)
    source.add(VECTORS)
    spread = sharded_flat(source, [lambda: faiss.IndexFlatIP(16)] * 3)
    scores, rows = spread.search(VECTORS[:20], 5)
    expected = faiss.IndexFlatIP(16)
    fill(expected, source, 0, 500, block=64)
    expected_scores, expected_rows = expected.search(VECTORS[:20], 5)
    assert np.array_equal(rows, expected_rows)
    assert np.allclose(scores, expected_scores, atol=1e-5)


@pytest.mark.skipif(
    hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0, reason="this machine has a GPU"
)
def test_without_a_gpu_the_cure_is_named():
    with pytest.raises(BrokenIndexError, match="pip install faiss-gpu-cu12"):
        to_gpus(faiss.IndexFlatIP(16), "flat")
