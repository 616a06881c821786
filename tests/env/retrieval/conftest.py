import contextlib
import socket
import threading
import time

import pytest
import uvicorn

from memopd_env.retrieval import Passage, SparseRetriever

PASSAGES = [
    Passage("0", "The Who", "An English rock band from London."),
    Passage("1", "Hamlet", "A tragedy by William Shakespeare."),
    Passage("2", "Paris", "The capital of France."),
    Passage("3", "Berlin", "The capital of Germany."),
    Passage("4", "<script>", "A tag & a <b>test</b> of France."),
]


class Counting:
    """A real retriever that remembers what it was asked."""

    def __init__(self, retriever, delay=0.0):
        self.retriever, self.delay, self.asked = retriever, delay, []

    def __len__(self):
        return len(self.retriever)

    def search(self, queries, k):
        self.asked.append(list(queries))
        time.sleep(self.delay)
        return self.retriever.search(queries, k)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(app, port=None):
    """A real server on loopback, in a thread."""
    port = port or free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def passages():
    return list(PASSAGES)


@pytest.fixture
def sparse():
    return SparseRetriever.from_passages(PASSAGES)


@pytest.fixture
def counting(sparse):
    return Counting(sparse)


@pytest.fixture
def serve():
    return serving


@pytest.fixture
def port():
    return free_port()
