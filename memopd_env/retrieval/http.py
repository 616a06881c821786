"""A retriever that lives behind an address, made to look like one that does not fail.

Searches of concurrent callers are joined into one request, answers are remembered, and a request that did not get
through is sent again, to the next address, after a pause that grows and is never the same twice. Only when its deadline
has passed does the caller see an error, and that error says what kind of failure it was.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import httpx

from memopd_env.errors import ConfigError
from memopd_env.retrieval.base import Passage, RetrievalError
from memopd_env.retrieval.batching import MicroBatcher
from memopd_env.retrieval.errors import (
    BadReplyError,
    BadRequestError,
    RetrieverBusyError,
    RetrieverTimeoutError,
    RetrieverUnreachableError,
)
from memopd_env.retrieval.wire import decode_reply, encode_request

_MAX_PAUSE = 5.0
_RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})


class HTTPRetriever:
    """Asks one or several retriever servers; safe to call from several threads.

    Args:
        base_urls: One address or several that serve the same index, e.g. ``http://127.0.0.1:8013``; the full
            ``…/retrieve`` is understood too.
        timeout: Seconds for one attempt.
        deadline: Seconds for a search with all its attempts; afterwards the last failure is raised.
        first_contact: The same while no server could ever be connected to: a wrong address is known sooner than a
            server that restarts.
        token: Sent as ``Authorization: Bearer``.
        cached_queries: Answers of this many recent (query, k) are kept.
        max_batch: Queries joined into one request.
        connections: Requests under way at once; more callers than that are joined.
        max_query: Characters of a query that are sent; no encoder reads further.
        transport: For tests.

    Raises:
        ConfigError: If an address is not an http address.
    """

    def __init__(
        self,
        base_urls: str | Sequence[str],
        *,
        timeout: float = 30.0,
        deadline: float = 120.0,
        first_contact: float = 15.0,
        token: str | None = None,
        cached_queries: int = 10_000,
        max_batch: int = 64,
        connections: int = 4,
        max_query: int = 8_000,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        addresses = [base_urls] if isinstance(base_urls, str) else list(base_urls)
        for address in addresses or [""]:
            _check_address(address)
        self._urls = [address.rstrip("/").removesuffix("/retrieve") + "/retrieve" for address in addresses]
        self._preferred = 0
        self._deadline, self._first_contact = deadline, min(first_contact, deadline)
        self._connected = False
        self._max_query, self._max_batch = max_query, max_batch
        headers = {"content-type": "application/json"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            transport=transport,
            trust_env=False,
        )
        self._cache: OrderedDict[tuple[str, int], list[Passage]] = OrderedDict()
        self._cached_queries = cached_queries
        self._lock = threading.Lock()
        self._random = random.Random()
        # While every connection is busy callers gather by themselves, so no one waits on purpose.
        self._batcher = MicroBatcher(
            _Direct(self._request), max_batch=max_batch, max_wait=0.0, max_queue=1_000_000, workers=connections
        )

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query up to ``k`` passages, best first.

        Raises:
            RetrieverUnreachableError: If no server could be connected to before the deadline.
            RetrieverTimeoutError: If the last attempt got no answer in time.
            RetrieverBusyError: If servers stayed busy or loading until the deadline.
            BadRequestError: If a server refuses the request for what it is.
            BadReplyError: If the answer is not a retriever's.
        """
        if k < 1:
            return [[] for _ in queries]
        sent = [query[: self._max_query] for query in queries]
        with self._lock:
            known = {query: list(self._cache[query, k]) for query in sent if (query, k) in self._cache}
            for query in known:
                self._cache.move_to_end((query, k))
        new = list(dict.fromkeys(query for query in sent if query not in known))
        if new:
            # In pieces that keep a server's limits, sent over all connections at once.
            pieces = [new[start : start + self._max_batch] for start in range(0, len(new), self._max_batch)]
            pending = [self._batcher.submit(piece, k) for piece in pieces]
            answers = [passages for future in pending for passages in future.result()]
            found = dict(zip(new, answers, strict=True))
            known.update(found)
            with self._lock:
                self._cache.update(((query, k), passages) for query, passages in found.items())
                while len(self._cache) > self._cached_queries:
                    self._cache.popitem(last=False)
        return [list(known[query]) for query in sent]

    def close(self) -> None:
        """Answer what waits and close all connections."""
        self._batcher.close()
        self._client.close()

    def __enter__(self) -> HTTPRetriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        body = encode_request(queries, k)
        started = time.monotonic()
        attempt = 0
        while True:
            url = self._urls[self._preferred % len(self._urls)]
            try:
                found = self._attempt(url, body, len(queries))
                self._connected = True
                return found
            except _Again as failure:
                attempt += 1
                self._preferred += 1
                # Another address is tried at once; a pause comes after a round through all of them.
                pause = 0.0
                if attempt % len(self._urls) == 0:
                    grown = min(_MAX_PAUSE, 0.05 * 2 ** min(attempt // len(self._urls), 10))
                    pause = max(failure.pause, self._random.uniform(grown / 2, grown))
                self._connected |= not isinstance(failure.error, RetrieverUnreachableError)
                patience = self._deadline if self._connected else self._first_contact
                if time.monotonic() + pause - started >= patience:
                    raise failure.error from failure.error.__cause__
                time.sleep(pause)

    def _attempt(self, url: str, body: bytes, queries: int) -> list[list[Passage]]:
        try:
            response = self._client.post(url, content=body)
        except httpx.TimeoutException as error:
            if isinstance(error, httpx.ConnectTimeout):
                raise _Again(_unreachable(url, error)) from error
            raise _Again(
                RetrieverTimeoutError(f"{url} did not answer in time: raise timeout, or use a faster index kind")
            ) from error
        except httpx.TransportError as error:
            raise _Again(_unreachable(url, error)) from error
        if response.status_code == 200:
            return decode_reply(response.content, queries, url)
        reason = f"{url} answered {response.status_code}: {_detail(response)}"
        if response.status_code in (429, 503):
            raise _Again(RetrieverBusyError(reason), _retry_after(response))
        if response.status_code == 504:
            raise _Again(RetrieverTimeoutError(reason))
        if response.status_code in _RETRIED_STATUS:
            raise _Again(RetrievalError(reason))
        if response.status_code in (401, 403):
            raise BadRequestError(f"{reason} (give the server's token)")
        if response.status_code in (404, 405):
            raise BadReplyError(f"{reason}; is it a retriever?")
        raise BadRequestError(reason)


class _Direct:
    """A request function in the shape of a retriever, for the batcher."""

    def __init__(self, request: Callable[[Sequence[str], int], list[list[Passage]]]) -> None:
        self._request = request

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Ask."""
        return self._request(queries, k)


class _Again(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, error: RetrievalError, pause: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.pause = pause


def _check_address(address: str) -> None:
    problem = ""
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        problem = f" ({error})"
    else:
        if url.scheme in ("http", "https") and url.host:
            return
    raise ConfigError(f"{address!r} is not the address of a retriever{problem}: give e.g. http://127.0.0.1:8013")


def _unreachable(url: str, error: Exception) -> RetrieverUnreachableError:
    return RetrieverUnreachableError(
        f"cannot reach {url} ({error}): start a server with `memopd retriever serve --index DIR`, or check the address"
    )


def _detail(response: httpx.Response) -> str:
    with contextlib.suppress(ValueError):
        record = response.json()
        if isinstance(record, dict) and "detail" in record:
            return str(record["detail"])[:300]
    return response.text[:120]


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(max(float(response.headers.get("retry-after", "0")), 0.0), _MAX_PAUSE)
    except ValueError:
        return 0.0
