r"""The request and the reply of ``POST /retrieve``, as Search-R1 and MEM1 clients send and expect them.

    {"queries": ["…"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "…", "contents": "\"Title\"\ntext"}, "score": 0.8}]]}

One list per query. Without scores an entry is the bare document. Both sides of the product go through this file, and
it works on bytes: JSON may carry lone surrogates, which neither a typed model nor UTF-8 can hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memopd_env.retrieval.base import Passage
from memopd_env.retrieval.errors import BadReplyError, BadRequestError


@dataclass(frozen=True)
class Limits:
    """What a server accepts.

    Attributes:
        max_body: Bytes of a request body.
        max_queries: Queries in one request.
        max_query: Characters of one query.
        max_topk: Passages per query.
        default_topk: Where a request names none.
    """

    max_body: int = 8_000_000
    max_queries: int = 512
    max_query: int = 100_000
    max_topk: int = 100
    default_topk: int = 3


@dataclass(frozen=True)
class RetrieveRequest:
    """A request that kept all limits."""

    queries: list[str]
    topk: int
    return_scores: bool


def encode_request(queries: Sequence[str], topk: int, return_scores: bool = True) -> bytes:
    """The body of a request."""
    return json.dumps({"queries": list(queries), "topk": topk, "return_scores": return_scores}).encode()


def decode_request(body: bytes, limits: Limits) -> RetrieveRequest:
    """Read the body of a request; one query may stand alone instead of in a list.

    Raises:
        BadRequestError: Saying what is wrong and what the limit is.
    """
    try:
        record = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f'the body is not JSON ({error}): send {{"queries": ["…"], "topk": 3}}') from error
    if not isinstance(record, dict):
        raise BadRequestError('the body must be an object: {"queries": ["…"], "topk": 3}')
    queries = record.get("queries", record.get("query"))
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequestError('"queries" must be a list of strings')
    if len(queries) > limits.max_queries:
        raise BadRequestError(
            f"{len(queries):,} queries in one request, the limit is {limits.max_queries}: send several requests"
        )
    for number, query in enumerate(queries, start=1):
        if len(query) > limits.max_query:
            raise BadRequestError(
                f"query {number} has {len(query):,} characters, the limit is {limits.max_query:,}: shorten it"
            )
    topk = record.get("topk")
    topk = limits.default_topk if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= limits.max_topk:
        raise BadRequestError(f'"topk" must be a whole number from 1 to {limits.max_topk}')
    return RetrieveRequest(queries, topk, bool(record.get("return_scores", False)))


def encode_reply(result: Sequence[Sequence[Passage]], return_scores: bool) -> bytes:
    """The body of a reply."""

    def entry(passage: Passage) -> dict[str, Any]:
        document = {"id": passage.id, "contents": passage.contents}
        return {"document": document, "score": passage.score} if return_scores else document

    return json.dumps({"result": [[entry(passage) for passage in found] for found in result]}).encode()


def decode_reply(body: bytes, queries: int, source: str) -> list[list[Passage]]:
    """Read the body of a reply, with or without scores.

    Args:
        body: The raw body.
        queries: How many queries were asked.
        source: The server, for messages.

    Raises:
        BadReplyError: If it is not JSON, has another shape, or answers another number of queries.
    """
    try:
        record = json.loads(body)
    except (ValueError, RecursionError) as error:
        start = body[:80].decode("utf-8", "replace")
        raise BadReplyError(f"{source} answered something that is not JSON: {start!r}; is it a retriever?") from error
    result = record.get("result") if isinstance(record, dict) else None
    if not isinstance(result, list) or not all(isinstance(found, list) for found in result):
        raise BadReplyError(f'{source} answered JSON without a "result" list of lists: is it a retriever?')
    if len(result) != queries:
        raise BadReplyError(f"{source} answered {len(result)} of {queries} queries: it is defective")
    return [[_passage(entry, source) for entry in found] for found in result]


def _passage(entry: Any, source: str) -> Passage:
    document = entry.get("document", entry) if isinstance(entry, dict) else None
    id = document.get("id") if isinstance(document, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    score = entry.get("score", 0.0) if isinstance(entry, dict) else None
    if (
        isinstance(id, bool)
        or not isinstance(id, str | int)
        or not isinstance(contents, str)
        or isinstance(score, bool)
        or not isinstance(score, int | float)
        or not math.isfinite(score)
    ):
        raise BadReplyError(
            f'{source} answered an entry that is not {{"document": {{"id", "contents"}}, "score"}}: {str(entry)[:80]}'
        )
    return Passage.from_contents(str(id), contents, float(score))
