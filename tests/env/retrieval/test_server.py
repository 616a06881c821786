import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from memopd_env.errors import CorpusError
from memopd_env.retrieval.errors import EncoderError
from memopd_env.retrieval.server import create_app
from memopd_env.retrieval.wire import Limits

# What a Search-R1 or MEM1 rollout sends, byte for byte as `requests.post(url, json=payload)` puts it, and the reply
# that its `[result['document']['contents'] for result in results]` reads.
RECORDED_REQUEST = (
    b'{"queries": ["capital of France", "Who wrote Hamlet?"], "topk": 1, "return_scores": true}',
    {"Content-Type": "application/json", "User-Agent": "python-requests/2.32.3", "Accept": "*/*"},
)


@pytest.fixture
def url(counting, serve):
    with serve(create_app(counting, token=None)) as address:
        yield address


def test_a_recorded_request_of_the_field_is_answered_in_the_expected_shape(url):
    body, headers = RECORDED_REQUEST
    reply = httpx.post(f"{url}/retrieve", content=body, headers=headers)
    assert reply.status_code == 200
    result = reply.json()["result"]
    assert reply.json().keys() == {"result"}
    assert [[entry.keys() for entry in found] for found in result] == [[{"document", "score"}]] * 2
    assert [found[0]["document"] for found in result] == [
        {"id": "2", "contents": '"Paris"\nThe capital of France.'},
        {"id": "1", "contents": '"Hamlet"\nA tragedy by William Shakespeare.'},
    ]
    assert all(isinstance(found[0]["score"], float) for found in result)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_without_scores_the_documents_come_bare_for_any_number_of_queries(url, count):
    body = {"queries": ["capital"] * count, "topk": 2, "return_scores": False}
    result = httpx.post(f"{url}/retrieve", json=body).json()["result"]
    assert [[entry["id"] for entry in found] for found in result] == [["2", "3"]] * count


def test_topk_defaults_and_no_queries_give_no_lists(url):
    assert len(httpx.post(f"{url}/retrieve", json={"queries": ["the a of"]}).json()["result"][0]) == 3
    assert httpx.post(f"{url}/retrieve", json={"queries": []}).json() == {"result": []}


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 422, "not JSON"),
        (b'{"queries": 3}', 422, "list of strings"),
        (json.dumps({"queries": ["q"] * 10_000}).encode(), 422, "10,000 queries in one request"),
        (json.dumps({"queries": ["q" * 200_000]}).encode(), 422, "200,000 characters"),
        (json.dumps({"queries": ["q" * 10_000_000]}).encode(), 413, "exceeds 8,000,000 bytes"),
        (b'{"queries": ["q"], "topk": 1000}', 422, "1 to 100"),
    ],
)
def test_a_bad_request_is_refused_and_the_server_stays_up(url, body, status, reason):
    reply = httpx.post(f"{url}/retrieve", content=body)
    assert reply.status_code == status
    assert reason in reply.json()["detail"]
    assert httpx.get(f"{url}/health").json() == {"status": "ready", "retriever": "Counting", "passages": 5}


def test_surrogates_nul_and_long_queries_are_answered(url):
    queries = ["\ud800 france", "fra\x00nce", "france " * 10_000]
    reply = httpx.post(f"{url}/retrieve", content=json.dumps({"queries": queries, "topk": 1}))
    assert [len(found) for found in reply.json()["result"]] == [1, 0, 1]


def test_concurrent_clients_share_searches_and_get_their_own_answers(serve, counting):
    counting.delay = 0.02
    with serve(create_app(counting)) as url, httpx.Client() as client, ThreadPoolExecutor(32) as pool:

        def ask(number):
            query = ("france", "hamlet", "germany")[number % 3]
            reply = client.post(f"{url}/retrieve", json={"queries": [f"{query} x{number}"], "topk": 1})
            return reply.json()["result"][0][0]["id"]

        assert list(pool.map(ask, range(96))) == [("2", "1", "3")[number % 3] for number in range(96)]
    assert len(counting.asked) < 48


def test_health_is_503_until_the_index_is_loaded(serve, sparse):
    loaded = threading.Event()

    def load():
        loaded.wait(10)
        return sparse

    with serve(create_app(load)) as url:
        assert httpx.get(f"{url}/health").status_code == 503
        early = httpx.post(f"{url}/retrieve", json={"queries": ["a"]})
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        loaded.set()
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert httpx.post(f"{url}/retrieve", json={"queries": ["france"], "topk": 1}).status_code == 200


def test_a_failed_load_is_told_by_health_and_by_requests(serve):
    def load():
        raise CorpusError("no corpus at x.jsonl")

    with serve(create_app(load)) as url:
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/health").json()["status"] != "failed":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "no corpus at x.jsonl" in httpx.get(f"{url}/health").json()["error"]
        reply = httpx.post(f"{url}/retrieve", json={"queries": ["a"]})
        assert reply.status_code == 503
        assert "could not be loaded: no corpus" in reply.json()["detail"]


def test_a_failing_search_is_a_500_with_its_reason_and_the_server_stays_up(serve, sparse):
    class Broken:
        def search(self, queries, k):
            if "nan" in queries:
                raise EncoderError("encoder 'x' returned NaN")
            return sparse.search(queries, k)

    with serve(create_app(Broken())) as url:
        reply = httpx.post(f"{url}/retrieve", json={"queries": ["nan"]})
        assert (reply.status_code, reply.json()["error"]) == (500, "EncoderError")
        assert "returned NaN" in reply.json()["detail"]
        assert httpx.post(f"{url}/retrieve", json={"queries": ["france"]}).status_code == 200


def test_a_full_queue_answers_429_with_retry_after_while_health_answers(serve, counting):
    counting.delay = 0.3
    with serve(create_app(counting, max_queue=2, max_batch=1)) as url, ThreadPoolExecutor(12) as pool:
        replies = list(
            pool.map(lambda n: httpx.post(f"{url}/retrieve", json={"queries": [f"{n}"]}, timeout=30), range(12))
        )
        busy = [reply for reply in replies if reply.status_code == 429]
        assert busy and all(reply.headers["retry-after"] == "1" for reply in busy)
        assert {reply.status_code for reply in replies} == {200, 429}
        assert httpx.get(f"{url}/health", timeout=0.25).status_code == 200


def test_a_search_that_takes_too_long_is_given_up_with_504(serve, counting):
    counting.delay = 0.5
    with serve(create_app(counting, timeout=0.05)) as url:
        reply = httpx.post(f"{url}/retrieve", json={"queries": ["a"]})
        assert (reply.status_code, reply.json()["error"]) == (504, "RetrieverTimeoutError")


def test_health_answers_while_a_search_is_running(serve, counting):
    counting.delay = 1.0
    with serve(create_app(counting)) as url, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(httpx.post, f"{url}/retrieve", json={"queries": ["france"]})
        time.sleep(0.1)
        assert httpx.get(f"{url}/health", timeout=0.5).status_code == 200
        assert not slow.done()
        assert slow.result().status_code == 200


def test_a_token_guards_everything_but_health(serve, sparse):
    with serve(create_app(sparse, token="secret")) as url:
        right, wrong = {"Authorization": "Bearer secret"}, {"Authorization": "Bearer secre"}
        assert httpx.get(f"{url}/health").status_code == 200
        for headers in ({}, wrong):
            assert httpx.post(f"{url}/retrieve", json={"queries": ["a"]}, headers=headers).status_code == 401
            assert httpx.get(f"{url}/metrics", headers=headers).status_code == 401
        assert httpx.post(f"{url}/retrieve", json={"queries": ["a"]}, headers=right).status_code == 200


def test_reload_exchanges_the_index_and_keeps_the_old_one_if_that_fails(serve, sparse, counting):
    sources = [sparse, counting, CorpusError("gone")]

    def load():
        source = sources.pop(0)
        if isinstance(source, Exception):
            raise source
        return source

    headers = {"Authorization": "Bearer t"}
    with serve(create_app(load, token="t")) as url, httpx.Client(headers=headers) as client:
        while client.get(f"{url}/health").status_code != 200:
            time.sleep(0.01)
        assert client.get(f"{url}/health").json()["retriever"] == "SparseRetriever"
        assert client.post(f"{url}/reload").status_code == 200
        assert client.get(f"{url}/health").json()["retriever"] == "Counting"
        assert client.post(f"{url}/reload").status_code == 500
        assert client.get(f"{url}/health").json()["reload_error"] == "gone"
        assert client.post(f"{url}/retrieve", json={"queries": ["france"]}).status_code == 200


def test_reload_needs_a_token(url):
    assert "needs a server with a token" in httpx.post(f"{url}/reload").json()["detail"]


def test_people_search_with_titles_and_nothing_a_document_says_becomes_markup(url):
    found = httpx.get(f"{url}/search", params={"q": "france", "k": 2}).json()
    assert [entry["title"] for entry in found["results"]] == ["Paris", "<script>"]
    page = httpx.get(f"{url}/search", params={"q": '"><script>france'}, headers={"accept": "text/html"}).text
    assert "<b>Paris</b>" in page
    assert "<script>" not in page


def test_metrics_count_requests_batches_latency_and_errors(url):
    for _ in range(3):
        httpx.post(f"{url}/retrieve", json={"queries": ["france", "hamlet"]})
    httpx.post(f"{url}/retrieve", content=b"{")
    httpx.get(f"{url}/nothing/here")
    text = httpx.get(f"{url}/metrics").text
    assert 'memopd_retriever_requests_total{path="/retrieve",status="200"} 3.0' in text
    assert 'memopd_retriever_requests_total{path="/retrieve",status="422"} 1.0' in text
    assert 'memopd_retriever_requests_total{path="other",status="404"} 1.0' in text
    assert 'memopd_retriever_errors_total{path="/retrieve"} 1.0' in text
    assert "memopd_retriever_batch_queries_sum 6.0" in text
    assert 'memopd_retriever_latency_seconds_count{path="/retrieve"} 4.0' in text
    assert "memopd_retriever_queue_queries 0.0" in text


def test_a_body_without_end_is_cut_off(serve, sparse):
    with serve(create_app(sparse, limits=Limits(max_body=10_000))) as url:
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            raw.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            raw.sendall((b"1000\r\n" + b"a" * 4096 + b"\r\n") * 3)
            assert raw.recv(100).startswith(b"HTTP/1.1 413")
        assert httpx.get(f"{url}/health").status_code == 200
