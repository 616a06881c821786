"""The retriever as a server: a drop-in for the one that Search-R1 and MEM1 clients call.

The event loop only reads and writes sockets. A search waits in the micro-batching queue and runs in its thread, so
hundreds of clients share one encode and one index scan, health checks answer while an index loads, and too many
clients are told to come back (429) instead of being dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import html
import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from memopd_env.errors import MemOPDError, MissingExtraError
from memopd_env.retrieval.base import Passage, Retriever
from memopd_env.retrieval.batching import MicroBatcher
from memopd_env.retrieval.errors import BadRequestError, RetrieverBusyError, RetrieverTimeoutError
from memopd_env.retrieval.metrics import Metrics
from memopd_env.retrieval.wire import Limits, decode_request, encode_reply

try:
    from fastapi import FastAPI, Request, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise MissingExtraError("fastapi", "retrieval") from error

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (BadRequestError, 422),
    (RetrieverBusyError, 429),
    (RetrieverTimeoutError, 504),
)
_EXAMPLE = {"queries": ["Who wrote Hamlet?"], "topk": 3, "return_scores": True}


class Service:
    """A retriever that may still be loading, may be exchanged, and is searched in batches."""

    def __init__(
        self,
        source: Retriever | Callable[[], Retriever],
        metrics: Metrics,
        *,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        timeout: float,
        workers: int,
    ) -> None:
        self._load = None if isinstance(source, Retriever) else source
        self.retriever = source if isinstance(source, Retriever) else None
        self.failure = ""
        self._timeout = timeout
        self._loading = asyncio.Lock()
        self.batcher = MicroBatcher(
            self._current,
            max_batch=max_batch,
            max_wait=max_wait,
            max_queue=max_queue,
            workers=workers,
            on_batch=metrics.batch,
        )

    def _current(self) -> Retriever:
        if self.retriever is None:
            raise RetrieverBusyError(
                f"the index could not be loaded: {self.failure}"
                if self.failure
                else "the index is still loading: try again shortly"
            )
        return self.retriever

    async def load(self) -> None:
        """Load, or load again, in a thread; the retriever in use is replaced only by a good one.

        Raises:
            RetrievalError: If the server was started around an object and has nothing to load from.
            MemOPDError: Whatever loading raises.
        """
        if self._load is None:
            raise BadRequestError("this server was started around an object: there is nothing to load again")
        async with self._loading:
            try:
                self.retriever = await asyncio.to_thread(self._load)
            except MemOPDError as error:
                self.failure = str(error)
                raise
            self.failure = ""
        logger.info("index ready")

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Search in the batching thread."""
        self._current()
        future = asyncio.wrap_future(self.batcher.submit(queries, k))
        try:
            return await asyncio.wait_for(future, self._timeout)
        except TimeoutError as error:
            raise RetrieverTimeoutError(
                f"no answer within {self._timeout:g} s: use a faster index kind, a GPU or more servers"
            ) from error


def create_app(
    retriever: Retriever | Callable[[], Retriever],
    *,
    limits: Limits | None = None,
    max_batch: int = 64,
    max_wait: float = 0.002,
    max_queue: int = 4096,
    timeout: float = 60.0,
    workers: int = 1,
    token: str | None = None,
) -> FastAPI:
    """Build the web application.

    Args:
        retriever: What answers, or a function that loads it: then the server is up at once, ``/health`` says 503 until
            it is loaded, and ``POST /reload`` loads it again.
        limits: What is accepted.
        max_batch: Queries joined into one search.
        max_wait: Seconds that an idle searcher waits for company.
        max_queue: Queries that may wait; beyond it a client gets 429 with ``Retry-After``.
        timeout: Seconds until a search is given up with 504.
        workers: Threads that search.
        token: If set, every address but ``/health`` needs ``Authorization: Bearer TOKEN``.
    """
    limits = limits or Limits()
    metrics = Metrics()
    service = Service(
        retriever,
        metrics,
        max_batch=max_batch,
        max_wait=max_wait,
        max_queue=max_queue,
        timeout=timeout,
        workers=workers,
    )
    metrics.watch_queue(lambda: service.batcher.queued)

    reloads: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load_and_log(service)) if service.retriever is None else None
        # Signals can be handled in the main thread only; elsewhere POST /reload remains.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError, AttributeError):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: reloads.append(loop.create_task(_load_and_log(service))))
        yield
        if loading is not None:
            loading.cancel()
        await asyncio.to_thread(service.batcher.close)

    app = FastAPI(title="MemOPD retriever", lifespan=lifespan)
    app.state.service = service
    app.add_middleware(_Guard, limits=limits, token=token, metrics=metrics)

    @app.exception_handler(MemOPDError)
    async def failed(request: Request, error: MemOPDError) -> Response:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
        if isinstance(error, RetrieverBusyError) and service.retriever is None:
            status = 503
        if status >= 500 and status != 503:
            logger.error("%s: %s", type(error).__name__, error)
        return _refusal(status, str(error), type(error).__name__)

    body = {"content": {"application/json": {"schema": {"type": "object", "example": _EXAMPLE}}}, "required": True}

    @app.post("/retrieve", openapi_extra={"requestBody": body})
    async def retrieve(request: Request) -> Response:
        """Passages for queries, in the field's common form."""
        asked = decode_request(await request.body(), limits)
        found = await service.search(asked.queries, asked.topk)
        if len(found) * asked.topk > 500:
            reply = await asyncio.to_thread(encode_reply, found, asked.return_scores)
        else:
            reply = encode_reply(found, asked.return_scores)
        return Response(reply, media_type="application/json")

    @app.get("/health")
    async def health() -> Response:
        """200 once the index is loaded, 503 before."""
        if service.retriever is None:
            return _json(503, {"status": "failed" if service.failure else "loading", "error": service.failure})
        known = service.retriever
        report = {"status": "ready", "retriever": type(known).__name__}
        if hasattr(known, "__len__"):
            report["passages"] = len(known)  # pyright: ignore[reportArgumentType]
        if service.failure:
            report["reload_error"] = service.failure
        return _json(200, report)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Prometheus metrics."""
        content, media_type = metrics.render()
        return Response(content, headers={"content-type": media_type})

    @app.get("/search")
    async def search(request: Request, q: str, k: int = limits.default_topk) -> Response:
        """Search for people: titles, text and scores, as a page in a browser and as JSON otherwise."""
        asked = decode_request(json.dumps({"queries": [q], "topk": k}).encode(), limits)
        found = (await service.search(asked.queries, asked.topk))[0]
        if "text/html" in request.headers.get("accept", ""):
            return Response(_page(q, found), media_type="text/html")
        results = [
            {"rank": rank, "title": passage.title, "text": passage.text, "id": passage.id, "score": passage.score}
            for rank, passage in enumerate(found, start=1)
        ]
        return _json(200, {"query": q, "results": results})

    @app.post("/reload")
    async def reload() -> Response:
        """Load the index again and exchange it under load; needs a token to be set."""
        if token is None:
            raise BadRequestError("reload over HTTP needs a server with a token (--token); or send SIGHUP to it")
        await service.load()
        return _json(200, {"status": "ready"})

    return app


async def _load_and_log(service: Service) -> None:
    try:
        await service.load()
    except MemOPDError as error:
        logger.error("the index could not be loaded: %s", error)


def _json(status: int, value: Any) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


def _refusal(status: int, message: str, kind: str) -> Response:
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else None
    return Response(json.dumps({"detail": message, "error": kind}), status, headers, "application/json")


def _page(query: str, found: list[Passage]) -> str:
    items = "".join(
        f"<li><b>{html.escape(passage.title)}</b> <small>{passage.score:.3f} · {html.escape(passage.id)}</small>"
        f"<p>{html.escape(passage.text)}</p></li>"
        for passage in found
    )
    return (
        "<!doctype html><meta charset=utf-8><title>MemOPD retriever</title>"
        "<style>body{font:16px/1.5 sans-serif;max-width:45em;margin:2em auto;padding:0 1em}</style>"
        f'<form><input name=q size=50 aria-label=Query value="{html.escape(query, quote=True)}"> '
        f"<button>Search</button></form><ol>{items or '<p>Nothing found.</p>'}</ol>"
    )


class _Guard:
    """Token, body size and metrics, before anything else sees a request."""

    def __init__(self, app: ASGIApp, limits: Limits, token: str | None, metrics: Metrics) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        headers = dict(scope["headers"])
        try:
            if (
                self._token is not None
                and scope["path"] != "/health"
                and not hmac.compare_digest(headers.get(b"authorization", b""), self._token)
            ):
                await _refusal(401, "this server needs a token: Authorization: Bearer …", "Unauthorized")(
                    scope, receive, watched
                )
                return
            body = await self._read(receive)
            if body is None:
                refusal = _refusal(413, f"the body exceeds {self._limits.max_body:,} bytes: send less", "TooLarge")
                refusal.headers["connection"] = "close"
                await refusal(scope, receive, watched)
                return
            await self._app(scope, _replay(body, receive), watched)
        finally:
            self._metrics.request(scope["path"], status, time.perf_counter() - started)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or None once it is too large; what follows is not read."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return b"".join(parts)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.max_body:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
