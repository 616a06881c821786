import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_env.errors import ConfigError
from memopd_env.retrieval import DenseRetriever, Passage, Retriever, SparseRetriever
from memopd_env.retrieval.combine import HybridRetriever, RerankRetriever, ShardedRetriever
from memopd_env.retrieval.encoders import HashingEncoder
from memopd_env.retrieval.errors import RetrieverUnreachableError


class Ranked:
    """Gives the same ranking to every query."""

    def __init__(self, *ids):
        self.ids = ids

    def search(self, queries, k):
        return [[Passage(id, id, "", 9.0 - rank) for rank, id in enumerate(self.ids[:k])] for _ in queries]


class Down:
    def search(self, queries, k):
        raise RetrieverUnreachableError("down")


def ids(result):
    return [[passage.id for passage in found] for found in result]


def test_fusion_adds_reciprocal_ranks():
    found = HybridRetriever([Ranked("a", "b", "c"), Ranked("c", "d")], constant=60).search(["q"], 4)[0]
    assert [passage.id for passage in found] == ["c", "a", "b", "d"]
    assert found[0].score == pytest.approx(1 / 63 + 1 / 61)
    assert found[1].score == pytest.approx(1 / 61)


def test_weights_decide_between_retrievers():
    retrievers = [Ranked("a", "b"), Ranked("b", "a")]
    assert ids(HybridRetriever(retrievers, weights=[2, 1]).search(["q"], 1)) == [["a"]]
    assert ids(HybridRetriever(retrievers, weights=[1, 2]).search(["q"], 1)) == [["b"]]
    with pytest.raises(ConfigError, match="2 retrievers and 1 weights"):
        HybridRetriever(retrievers, weights=[1])


def test_word_search_and_dense_search_fuse(passages):
    hybrid = HybridRetriever([SparseRetriever.from_passages(passages), DenseRetriever.from_passages(passages)])
    assert isinstance(hybrid, Retriever)
    assert ids(hybrid.search(["capital of France", "rock band"], 1)) == [["2"], ["0"]]
    assert hybrid.search(["a"], 0) == [[]]
    assert hybrid.search([], 3) == []


def test_a_failing_part_is_a_failure_of_the_whole():
    with pytest.raises(RetrieverUnreachableError):
        HybridRetriever([Ranked("a"), Down()]).search(["q"], 1)
    with pytest.raises(RetrieverUnreachableError):
        ShardedRetriever([Ranked("a"), Down()]).search(["q"], 1)


class Longest:
    def score(self, pairs):
        self.pairs = list(pairs)
        return np.array([len(passage) for _, passage in pairs], float)


def test_reranking_looks_deeper_and_keeps_the_best():
    scorer = Longest()
    reranker = RerankRetriever(Ranked("a", "bbb", "cc", "ddddd"), scorer, depth=3)
    found = reranker.search(["p", "q"], 2)
    assert ids(found) == [["bbb", "cc"]] * 2
    assert scorer.pairs[:3] == [("p", '"a"\n'), ("p", '"bbb"\n'), ("p", '"cc"\n')]
    assert found[0][0].score == len('"bbb"\n')
    assert reranker.search(["p"], 0) == [[]]


def test_reranking_of_nothing_finds_nothing(sparse):
    assert RerankRetriever(sparse, Longest()).search(["zzz", "france"], 1)[0] == []


def test_equal_scores_of_a_reranker_keep_the_order_of_the_retriever():
    class Same:
        def score(self, pairs):
            return np.zeros(len(pairs))

    assert ids(RerankRetriever(Ranked("a", "b", "c"), Same()).search(["q"], 3)) == [["a", "b", "c"]]


def test_a_reranker_that_gives_too_few_scores_is_an_error():
    class Short:
        def score(self, pairs):
            return np.zeros(1)

    with pytest.raises(RuntimeError, match="1,\\) for 2 pairs"):
        RerankRetriever(Ranked("a", "b"), Short()).search(["q"], 1)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 6))
def test_shards_give_exactly_the_whole(values, parts, k):
    rows = [Passage(str(row), f"t{value}", "word " * value) for row, value in enumerate(values)]
    encoder = HashingEncoder(16)
    edges = sorted({len(rows) * part // parts for part in range(parts + 1)})
    shards = [DenseRetriever.from_passages(rows[a:b], encoder) for a, b in itertools.pairwise(edges)]
    queries = ["word t3", "t1"]
    merged = ShardedRetriever(shards)
    whole = DenseRetriever.from_passages(rows, encoder)
    assert len(merged) == len(rows)
    scores = [[round(p.score, 5) for p in found] for found in merged.search(queries, k)]
    assert scores == [[round(p.score, 5) for p in found] for found in whole.search(queries, k)]


def test_shards_without_a_common_encoder_are_asked_one_by_one():
    assert ids(ShardedRetriever([Ranked("a", "b"), Ranked("c")]).search(["q"], 2)) == [["a", "c"]]
    with pytest.raises(ConfigError, match="no shard"):
        ShardedRetriever([])


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    """A real cross-encoder with two words' weights set by hand: it likes passages that hold the word 'river'."""
    torch = pytest.importorskip("torch")
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("cross")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "river", "bridge", "where", "is", "it", '"']
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    from memopd_env.retrieval.transformer import CrossEncoder

    return CrossEncoder(str(folder), device="cpu", batch_size=3, max_length=64)


def test_a_cross_encoder_scores_pairs_whatever_their_company(cross_encoder):
    pairs = [
        ("where is it", "river"),
        ("where is it", "bridge " * 40),
        ("is it", "bridge river"),
        ("", "\x00"),
        ("a", "b"),
    ]
    together = cross_encoder.score(pairs)
    alone = np.concatenate([cross_encoder.score([pair]) for pair in pairs])
    assert together.shape == (5,)
    assert np.allclose(together, alone, atol=1e-5)
    assert len(set(together.round(5))) >= 3
    assert cross_encoder.score([]).shape == (0,)


def test_a_cross_encoder_reranks(cross_encoder, passages):
    reranker = RerankRetriever(DenseRetriever.from_passages(passages), cross_encoder, depth=5)
    found = reranker.search(["where is it"], 3)[0]
    scores = cross_encoder.score([("where is it", passage.contents) for passage in passages])
    assert [p.score for p in found] == pytest.approx(sorted(scores, reverse=True)[:3], abs=1e-5)
