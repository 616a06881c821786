import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd_env.retrieval import Passage
from memopd_env.retrieval.errors import BadReplyError, BadRequestError
from memopd_env.retrieval.wire import Limits, decode_reply, decode_request, encode_reply, encode_request

ANY_TEXT = st.text(st.characters())  # lone surrogates included


@given(st.lists(ANY_TEXT, max_size=4), st.integers(1, 100), st.booleans())
def test_a_request_of_any_text_survives(queries, topk, scores):
    read = decode_request(encode_request(queries, topk, scores), Limits())
    assert (read.queries, read.topk, read.return_scores) == (queries, topk, scores)


@given(st.lists(st.lists(st.builds(Passage, ANY_TEXT, ANY_TEXT, ANY_TEXT, st.floats(-10, 10)), max_size=3), max_size=3))
def test_a_reply_of_any_text_survives(result):
    read = decode_reply(encode_reply(result, True), len(result), "server")
    assert [[(p.id, p.contents, p.score) for p in found] for found in read] == [
        [(p.id, Passage.from_contents(p.id, p.contents).contents, p.score) for p in found] for found in result
    ]


def test_the_bytes_are_those_that_existing_clients_know():
    result = [[Passage("7", "Hamlet", "A tragedy.", 0.5)], []]
    document = {"id": "7", "contents": '"Hamlet"\nA tragedy.'}
    assert json.loads(encode_reply(result, True)) == {"result": [[{"document": document, "score": 0.5}], []]}
    assert json.loads(encode_reply(result, False)) == {"result": [[document], []]}


def test_topk_may_be_missing_or_null_and_one_query_may_stand_alone():
    assert decode_request(b'{"queries": ["a"]}', Limits(default_topk=5)).topk == 5
    assert decode_request(b'{"queries": ["a"], "topk": null}', Limits()).topk == 3
    assert decode_request(b'{"queries": "a"}', Limits()).queries == ["a"]
    assert decode_request(b'{"query": "a"}', Limits()).queries == ["a"]
    assert decode_request(b'{"queries": []}', Limits()).queries == []
    assert decode_request(b'{"queries": ["a"]}', Limits()).return_scores is False


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be an object"),
        (b"{}", "list of strings"),
        (b'{"queries": [1]}', "list of strings"),
        (b'{"queries": {"a": 1}}', "list of strings"),
        (b'{"queries": ["a"], "topk": 0}', "1 to 100"),
        (b'{"queries": ["a"], "topk": 101}', "1 to 100"),
        (b'{"queries": ["a"], "topk": "3"}', "1 to 100"),
        (b'{"queries": ["a"], "topk": true}', "1 to 100"),
        (json.dumps({"queries": ["a"] * 513}).encode(), "513 queries in one request, the limit is 512"),
        (json.dumps({"queries": ["ok", "a" * 100_001]}).encode(), "query 2 has 100,001 characters"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(body, reason):
    with pytest.raises(BadRequestError, match=reason):
        decode_request(body, Limits())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "not JSON: '<html>'"),
        (b'{"result": "x"}', "without a"),
        (b'{"results": []}', "without a"),
        (b"[]", "without a"),
        (b'{"result": []}', "0 of 1 queries"),
        (b'{"result": [[], []]}', "2 of 1 queries"),
        (b'{"result": [[1]]}', "an entry that is not"),
        (b'{"result": [[{"document": null, "score": 1}]]}', "an entry that is not"),
        (b'{"result": [[{"document": {"id": "1"}, "score": 1}]]}', "an entry that is not"),
        (b'{"result": [[{"document": {"id": "1", "contents": "x"}, "score": NaN}]]}', "an entry that is not"),
        (b'{"result": [[{"document": {"id": "1", "contents": "x"}, "score": null}]]}', "an entry that is not"),
    ],
)
def test_a_bad_reply_is_refused_with_the_reason(body, reason):
    with pytest.raises(BadReplyError, match=f"server .*{reason}"):
        decode_reply(body, 1, "server")


def test_a_reply_without_scores_is_understood():
    assert decode_reply(b'{"result": [[{"id": 1, "contents": "\\"T\\"\\nx"}]]}', 1, "s") == [[Passage("1", "T", "x")]]
