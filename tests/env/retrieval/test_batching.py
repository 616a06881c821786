import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_env.retrieval import Passage, Retriever
from memopd_env.retrieval.batching import MicroBatcher
from memopd_env.retrieval.errors import RetrieverBusyError, RetrieverUnreachableError


class Echo:
    """Answers a query with passages named after it; can be held, and chokes on some queries."""

    def __init__(self):
        self.batches, self.gate = [], threading.Event()
        self.gate.set()

    def search(self, queries, k):
        self.gate.wait(10)
        self.batches.append((list(queries), k))
        if "poison" in queries:
            raise ValueError("poison")
        if "down" in queries:
            raise RetrieverUnreachableError("down")
        return [[Passage(f"{query}/{rank}", "", "") for rank in range(k)] for query in queries]


@pytest.fixture
def echo():
    return Echo()


def held(echo, batcher):
    """Make the worker busy, so that what is submitted next has to wait."""
    echo.gate.clear()
    first = batcher.submit(["first"], 1)
    deadline = time.monotonic() + 5
    while batcher.queued and time.monotonic() < deadline:
        time.sleep(0.001)
    return first


def test_what_waits_is_searched_at_once_and_dealt_out(echo):
    batcher = MicroBatcher(echo)
    held(echo, batcher)
    futures = [batcher.submit([f"q{number}", "shared"], 1 + number % 3) for number in range(10)]
    echo.gate.set()
    for number, future in enumerate(futures):
        k = 1 + number % 3
        assert [[p.id for p in found] for found in future.result(5)] == [
            [f"{query}/{rank}" for rank in range(k)] for query in (f"q{number}", "shared")
        ]
    batcher.close()
    assert len(echo.batches) == 2
    assert echo.batches[1] == (["q0", "shared", *(f"q{number}" for number in range(1, 10))], 3)


def test_a_batch_never_exceeds_its_bound_unless_one_request_does(echo):
    batcher = MicroBatcher(echo, max_batch=4)
    held(echo, batcher)
    futures = [batcher.submit([f"{number}-{part}" for part in range(3)], 1) for number in range(3)]
    futures.append(batcher.submit([f"big-{part}" for part in range(9)], 1))
    echo.gate.set()
    assert [len(future.result(5)) for future in futures] == [3, 3, 3, 9]
    batcher.close()
    assert [len(queries) for queries, _ in echo.batches] == [1, 3, 3, 3, 9]


def test_a_full_queue_refuses_and_recovers(echo):
    batcher = MicroBatcher(echo, max_queue=3)
    held(echo, batcher)
    batcher.submit(["a", "b"], 1)
    with pytest.raises(RetrieverBusyError, match="2 queries are waiting already, the limit is 3"):
        batcher.submit(["c", "d"], 1)
    assert batcher.queued == 2
    echo.gate.set()
    assert batcher.search(["c"], 1)[0][0].id == "c/0"
    batcher.close()


def test_one_bad_request_does_not_spoil_the_others(echo):
    batcher = MicroBatcher(echo)
    held(echo, batcher)
    good, bad, other = (batcher.submit([query], 1) for query in ("good", "poison", "other"))
    echo.gate.set()
    assert good.result(5)[0][0].id == "good/0"
    assert other.result(5)[0][0].id == "other/0"
    with pytest.raises(ValueError, match="poison"):
        bad.result(5)
    batcher.close()


def test_a_failure_of_the_server_is_told_to_all_without_asking_again(echo):
    batcher = MicroBatcher(echo)
    held(echo, batcher)
    futures = [batcher.submit([query], 1) for query in ("a", "down", "b")]
    echo.gate.set()
    for future in futures:
        with pytest.raises(RetrieverUnreachableError):
            future.result(5)
    batcher.close()
    assert len(echo.batches) == 2


def test_a_retriever_that_answers_too_few_is_an_error():
    class Short:
        def search(self, queries, k):
            return []

    batcher = MicroBatcher(Short())
    with pytest.raises(RuntimeError, match="answered 0 of 1 queries"):
        batcher.search(["a"], 1)
    batcher.close()


def test_closing_answers_what_waits_and_refuses_the_rest(echo):
    batcher = MicroBatcher(echo)
    held(echo, batcher)
    waiting = batcher.submit(["late"], 1)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    echo.gate.set()
    closing.join(5)
    assert waiting.result(0)[0][0].id == "late/0"
    with pytest.raises(RetrieverBusyError, match="shutting down"):
        batcher.submit(["x"], 1)


def test_a_cancelled_request_is_not_searched(echo):
    batcher = MicroBatcher(echo)
    held(echo, batcher)
    cancelled = batcher.submit(["never"], 1)
    assert cancelled.cancel()
    echo.gate.set()
    batcher.search(["after"], 1)
    batcher.close()
    assert all("never" not in queries for queries, _ in echo.batches)


def test_the_retriever_can_be_exchanged_between_batches(echo):
    second = Echo()
    current = [echo]
    batcher = MicroBatcher(lambda: current[0])
    batcher.search(["a"], 1)
    current[0] = second
    batcher.search(["b"], 1)
    batcher.close()
    assert (len(echo.batches), len(second.batches)) == (1, 1)
    assert isinstance(batcher, Retriever)


@given(st.lists(st.tuples(st.lists(st.sampled_from("abcd"), max_size=4), st.integers(1, 4)), max_size=30))
@settings(max_examples=25, deadline=None)
def test_every_caller_gets_exactly_its_own_answers(requests):
    echo = Echo()
    batcher = MicroBatcher(echo, max_batch=5, workers=2)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda request: batcher.search(*request), requests))
    batcher.close()
    assert [[[p.id for p in found] for found in result] for result in results] == [
        [[f"{query}/{rank}" for rank in range(k)] for query in queries] for queries, k in requests
    ]
