import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_env.errors import ConfigError
from memopd_env.retrieval.indexing import write_vectors
from memopd_env.retrieval.kinds import (
    KINDS,
    check_count,
    check_kind,
    code_bytes,
    estimate,
    factory,
    index_bytes,
    lists_for,
    refine_bytes,
    smaller_kinds,
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimated_size_is_the_size_of_the_files(kind, tmp_path):
    count, dim = 6_000, 48
    vectors = np.random.default_rng(0).standard_normal((count, dim)).astype(np.float32)
    write_vectors(vectors, tmp_path, kind, lambda *_: None, block=10_000)
    assert (tmp_path / "index.faiss").stat().st_size == pytest.approx(index_bytes(kind, dim, count), rel=0.02)
    refine = tmp_path / "refine.faiss"
    assert (refine.stat().st_size if refine.exists() else 0) == pytest.approx(refine_bytes(kind, dim, count), rel=0.02)


@given(st.integers(1, 4096))
def test_a_code_divides_the_vector(dim):
    assert dim % code_bytes(dim) == 0
    assert code_bytes(dim) <= max(1, dim / 6)


def test_the_codes_of_the_common_encoders_are_a_sixteenth_of_flat_or_less():
    for dim in (384, 768, 1024):
        assert index_bytes("ivfpq", dim, 21_000_000) <= index_bytes("flat", dim, 21_000_000) / 16
    assert (code_bytes(384), code_bytes(768)) == (64, 96)


@given(st.integers(1, 10**8))
def test_lists_are_a_power_of_two_or_as_many_as_can_be_trained(count):
    lists = lists_for(count)
    assert 1 <= lists <= max(1, count // 39)
    assert lists & (lists - 1) == 0 or lists == count // 39


@given(st.sampled_from(KINDS), st.integers(1, 2048), st.integers(1, 10**8))
def test_estimates_are_positive_and_grow_with_the_corpus(kind, dim, count):
    small, large = estimate(kind, dim, count), estimate(kind, dim, 2 * count)
    for name in ("memory", "disk", "build_memory", "build_disk", "build_seconds"):
        assert 0 < getattr(small, name) <= getattr(large, name)


def test_wikipedia_is_sized_as_the_ladder_says():
    sizes = {kind: round(index_bytes(kind, 768, 21_000_000) / 1e9, 1) for kind in KINDS}
    assert (sizes["flat"], sizes["flat-fp16"], sizes["sq8"]) == (64.5, 32.3, 16.1)
    assert sizes["ivfpq"] < 2.5
    assert smaller_kinds(768, 21_000_000, 20_000_000_000) == ["sq8", "ivfpq"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_factory_string_is_one_that_faiss_knows(kind):
    assert faiss.index_factory(384, factory(kind, 384, 100_000), faiss.METRIC_INNER_PRODUCT).d == 384


def test_unknown_kinds_and_too_few_passages_are_refused():
    with pytest.raises(ConfigError, match="no index kind is called 'tree': use one of flat"):
        check_kind("tree")
    with pytest.raises(ConfigError, match="255 passages are too few for ivfpq"):
        check_count("ivfpq", 255)
    check_count("flat", 1)
