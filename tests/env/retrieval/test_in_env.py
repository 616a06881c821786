"""The retrievers behind an environment: what an agent reads is what the retriever found."""

import gymnasium as gym
import pytest

import memopd_env  # noqa: F401 (registers the ids)
from memopd_env import Task
from memopd_env.errors import MemOPDError
from memopd_env.retrieval import HTTPRetriever
from memopd_env.retrieval.build import build
from memopd_env.retrieval.corpus import write_corpus
from memopd_env.retrieval.encoders import HashingEncoder
from memopd_env.retrieval.errors import RetrieverUnreachableError
from memopd_env.retrieval.server import create_app

TASKS = [Task("0", ["Which city is the capital of France?", "Who wrote Hamlet?"], [["Paris"], ["Shakespeare"]])]
SEARCH = "<think>-</think><search>capital of France</search>"


def first_information(retriever):
    env = gym.make("MemOPD-Q2", tasks=TASKS, retriever=retriever)
    env.reset(seed=0)
    return env.step(SEARCH)[0]["information"]


def test_every_backend_by_path_or_address_shows_the_passage(tmp_path, passages, sparse, serve):
    write_corpus(tmp_path / "corpus.jsonl", passages)
    build(tmp_path / "corpus.jsonl", tmp_path / "index", encoder=HashingEncoder(64))
    with serve(create_app(sparse)) as url:
        shown = [
            first_information(retriever) for retriever in (sparse, tmp_path / "corpus.jsonl", tmp_path / "index", url)
        ]
    assert all("Doc 1(Title: Paris) The capital of France." in information for information in shown)


def test_a_server_that_is_away_is_an_error_and_never_text(port):
    env = gym.make("MemOPD-Q2", tasks=TASKS, retriever=HTTPRetriever(f"http://127.0.0.1:{port}", deadline=0.2))
    env.reset(seed=0)
    with pytest.raises(RetrieverUnreachableError) as failure:
        env.step(SEARCH)
    assert isinstance(failure.value, MemOPDError)
