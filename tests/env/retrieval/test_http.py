import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from memopd_env.errors import ConfigError
from memopd_env.retrieval import HTTPRetriever, Retriever
from memopd_env.retrieval.errors import (
    BadReplyError,
    BadRequestError,
    RetrieverBusyError,
    RetrieverTimeoutError,
    RetrieverUnreachableError,
)
from memopd_env.retrieval.server import create_app
from memopd_env.retrieval.wire import encode_reply


def answering(*steps):
    """A transport that plays a list of answers, then repeats the last."""
    played = []

    def handle(request):
        step = steps[min(len(played), len(steps) - 1)]
        played.append(request)
        if isinstance(step, Exception):
            raise step
        return step(request) if callable(step) else step

    return httpx.MockTransport(handle), played


def good(request):
    queries = json.loads(request.content)["queries"]
    return httpx.Response(200, content=encode_reply([[] for _ in queries], True))


def test_answers_are_those_of_the_retriever_behind_it(serve, sparse):
    queries = ["france", "capital", "zzz", "", "\ud800", "hamlet"]
    with serve(create_app(sparse)) as url, HTTPRetriever(url) as client:
        assert isinstance(client, Retriever)
        assert client.search(queries, 2) == sparse.search(queries, 2)
        assert client.search([], 2) == []
        assert client.search(["france"], 0) == [[]]


def test_the_full_address_of_other_clients_is_understood(serve, sparse):
    with serve(create_app(sparse)) as url, HTTPRetriever(f"{url}/retrieve") as client:
        assert client.search(["hamlet"], 1)[0][0].title == "Hamlet"


def test_an_address_that_is_none_is_refused():
    for wrong in ("127.0.0.1:8013", "", [], ["http://x", "y"]):
        with pytest.raises(ConfigError, match="not the address of a retriever"):
            HTTPRetriever(wrong)


def test_repeated_queries_are_answered_from_the_cache(serve, counting):
    with serve(create_app(counting)) as url, HTTPRetriever(url) as client:
        first = client.search(["france", "france", "hamlet"], 2)
        assert client.search(["hamlet", "france"], 2) == [first[2], first[0]]
        assert counting.asked == [["france", "hamlet"]]
        first[0].clear()
        assert client.search(["france"], 2)[0]


def test_the_cache_is_bounded_and_keeps_what_was_used_last(serve, counting):
    with serve(create_app(counting)) as url, HTTPRetriever(url, cached_queries=2) as client:
        for query in ("a", "b", "a", "c", "a", "b"):
            client.search([query], 1)
    assert counting.asked == [["a"], ["b"], ["c"], ["b"]]


def test_concurrent_callers_are_joined(serve, counting):
    counting.delay = 0.05
    with (
        serve(create_app(counting)) as url,
        HTTPRetriever(url, connections=1) as client,
        ThreadPoolExecutor(32) as pool,
    ):
        results = list(pool.map(lambda n: client.search([f"france {n}"], 1)[0][0].id, range(64)))
    assert results == ["2"] * 64
    assert len(counting.asked) <= 8


def test_a_wrong_token_is_refused_once_and_says_what_is_missing(serve, sparse):
    with serve(create_app(sparse, token="t")) as url:
        with HTTPRetriever(url, token="t") as client:
            assert client.search(["hamlet"], 1)[0]
        with HTTPRetriever(url) as client, pytest.raises(BadRequestError, match="give the server's token"):
            client.search(["hamlet"], 1)


def test_no_server_is_unreachable_after_the_deadline(port):
    started = time.monotonic()
    with (
        HTTPRetriever(f"http://127.0.0.1:{port}", deadline=0.4) as client,
        pytest.raises(RetrieverUnreachableError, match="memopd retriever serve"),
    ):
        client.search(["a"], 1)
    assert time.monotonic() - started < 3


def test_an_address_that_never_answered_is_given_up_before_the_deadline(port):
    started = time.monotonic()
    with (
        HTTPRetriever(f"http://127.0.0.1:{port}", first_contact=0.3) as client,
        pytest.raises(RetrieverUnreachableError),
    ):
        client.search(["a"], 1)
    assert time.monotonic() - started < 10  # the deadline is 120 s


@pytest.mark.parametrize("answered_before", [True, False])
def test_only_a_server_that_has_answered_is_waited_for_until_the_deadline(answered_before):
    failures = iter([] if answered_before else [httpx.ConnectError("refused")] * 3)

    def handle(request):
        for failure in failures:
            raise failure
        return good(request)

    with HTTPRetriever("http://server", transport=httpx.MockTransport(handle), first_contact=0.02) as client:
        if answered_before:
            client.search(["a"], 1)
            failures = iter([httpx.ConnectError("refused")] * 3)
            assert client.search(["b"], 1) == [[]]  # half a second of refusals later
        else:
            with pytest.raises(RetrieverUnreachableError):
                client.search(["b"], 1)


@pytest.mark.parametrize("address", ["http://", "http://[::1", "ftp://host", "host:8013", "http://host:port", []])
def test_a_malformed_address_is_refused_at_once_and_named(address):
    with pytest.raises(ConfigError, match="address of a retriever"):
        HTTPRetriever(address)


def test_a_silent_server_is_a_time_out(serve, counting):
    counting.delay = 1.0
    with (
        serve(create_app(counting)) as url,
        HTTPRetriever(url, timeout=0.1, deadline=0.3) as client,
        pytest.raises(RetrieverTimeoutError, match="did not answer in time"),
    ):
        client.search(["a"], 1)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(200, content=b"<html>"), BadReplyError),
        (httpx.Response(200, json={"result": []}), BadReplyError),
        (httpx.Response(200, json={"results": [[]]}), BadReplyError),
        (httpx.Response(404, content=b"nothing"), BadReplyError),
        (httpx.Response(422, json={"detail": "too long"}), BadRequestError),
        (httpx.Response(413, json={"detail": "too large"}), BadRequestError),
    ],
)
def test_what_another_attempt_cannot_mend_is_raised_at_once(response, error):
    transport, played = answering(response)
    with HTTPRetriever("http://server", transport=transport) as client, pytest.raises(error):
        client.search(["a"], 1)
    assert len(played) == 1


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("cut"),
        httpx.ReadTimeout("slow"),
        httpx.Response(500),
        httpx.Response(502),
        httpx.Response(503),
        httpx.Response(429, headers={"retry-after": "0"}),
        httpx.Response(429, headers={"retry-after": "soon"}),
    ],
)
def test_what_another_attempt_may_mend_is_tried_again(trouble):
    transport, played = answering(trouble, trouble, good)
    with HTTPRetriever("http://server", transport=transport) as client:
        assert client.search(["a"], 1) == [[]]
    assert len(played) == 3


def test_a_server_that_stays_busy_is_a_busy_error_with_its_reason():
    transport, played = answering(httpx.Response(429, json={"detail": "9 queries are waiting"}))
    with (
        HTTPRetriever("http://server", transport=transport, deadline=0.3) as client,
        pytest.raises(RetrieverBusyError, match="9 queries are waiting"),
    ):
        client.search(["a"], 1)
    assert len(played) > 1


def test_the_next_address_is_tried_at_once_and_kept():
    asked = []

    def handle(request):
        asked.append(request.url.host)
        if request.url.host == "first":
            raise httpx.ConnectError("refused")
        return good(request)

    with HTTPRetriever(["http://first", "http://second"], transport=httpx.MockTransport(handle)) as client:
        client.search(["a"], 1)
        client.search(["b"], 1)
    assert asked == ["first", "second", "second"]


def test_failures_are_never_cached():
    transport, played = answering(httpx.Response(200, content=b"junk"), good)
    with HTTPRetriever("http://server", transport=transport) as client:
        with pytest.raises(BadReplyError):
            client.search(["a"], 1)
        assert client.search(["a"], 1) == [[]]
    assert len(played) == 2


def test_thousands_of_queries_go_out_in_pieces_that_a_server_takes(serve, sparse):
    queries = [f"\U0001f600 france {number} " + "東" * 500 for number in range(1500)]
    with serve(create_app(sparse)) as url, HTTPRetriever(url, max_batch=100) as client:
        assert [found[0].title for found in client.search(queries, 1)] == ["Paris"] * 1500


def test_a_full_batch_of_the_longest_queries_keeps_the_servers_limit(serve, sparse):
    queries = [f"france {number} " + "\U0001f600" * 20_000 for number in range(64)]
    with serve(create_app(sparse)) as url, HTTPRetriever(url) as client:
        assert [found[0].title for found in client.search(queries, 1)] == ["Paris"] * 64


def test_a_query_of_megabytes_is_cut_before_it_is_sent(serve, sparse):
    with serve(create_app(sparse)) as url, HTTPRetriever(url) as client:
        assert client.search(["france " + "x" * 10_000_000], 1)[0][0].title == "Paris"


def test_a_server_killed_and_restarted_loses_no_search(serve, sparse, port):
    app = lambda: create_app(sparse)  # noqa: E731
    results = []
    with HTTPRetriever(f"http://127.0.0.1:{port}", deadline=30, cached_queries=0) as client:

        def ask(worker):
            for number in range(30):
                results.append(client.search([f"france {worker} {number}"], 1)[0][0].id)
                time.sleep(0.005)

        threads = [threading.Thread(target=ask, args=(worker,)) for worker in range(8)]
        with serve(app(), port):
            for thread in threads:
                thread.start()
            time.sleep(0.1)
        time.sleep(0.2)
        assert any(thread.is_alive() for thread in threads)
        with serve(app(), port):
            for thread in threads:
                thread.join(20)
    assert results == ["2"] * 240
