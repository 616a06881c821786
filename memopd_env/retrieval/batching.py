"""Many callers, one search.

An encoder and an index take hardly longer for sixty queries than for one, and hundreds of environments ask at the same
time. So requests wait in a queue for a moment, all that is waiting is searched at once, and each caller gets its part.
The queue is bounded: a caller that finds it full is told so at once instead of waiting for ever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from memopd_env.retrieval.base import Passage, RetrievalError, Retriever
from memopd_env.retrieval.errors import RetrieverBusyError, RetrieverTimeoutError, RetrieverUnreachableError

# Failures that no single request can be guilty of.
_TROUBLE_FOR_ALL = (RetrieverBusyError, RetrieverTimeoutError, RetrieverUnreachableError)


@dataclass
class _Waiting:
    queries: Sequence[str]
    k: int
    future: Future[list[list[Passage]]]


class MicroBatcher:
    """Joins concurrent searches; itself a retriever.

    Args:
        retriever: What answers the joined searches, or a function that returns it (asked again for each batch, so that
            it can be exchanged under load).
        max_batch: Queries joined into one search. A single request may be larger and is then searched alone.
        max_wait: Seconds that the first request of a batch waits for others when a worker is idle.
        max_queue: Queries that may wait; more are refused.
        workers: Threads that search. More than one pays where a search mostly waits, as over HTTP.
        on_batch: Called with the number of queries of each search.
    """

    def __init__(
        self,
        retriever: Retriever | Callable[[], Retriever],
        *,
        max_batch: int = 64,
        max_wait: float = 0.002,
        max_queue: int = 4096,
        workers: int = 1,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        self._current: Callable[[], Retriever] = (lambda: retriever) if isinstance(retriever, Retriever) else retriever
        self._max_batch, self._max_wait, self._max_queue = max_batch, max_wait, max_queue
        self._on_batch = on_batch
        self._waiting: deque[_Waiting] = deque()
        self._queued = 0
        self._ready = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"retrieval-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> int:
        """Queries that wait now."""
        return self._queued

    def submit(self, queries: Sequence[str], k: int) -> Future[list[list[Passage]]]:
        """Queue a search.

        Raises:
            RetrieverBusyError: If the queue is full or the batcher is closed.
        """
        waiting = _Waiting(queries, k, Future())
        with self._ready:
            if self._closed:
                raise RetrieverBusyError("the retriever is shutting down: send the request again to its successor")
            if self._queued and self._queued + len(queries) > self._max_queue:
                raise RetrieverBusyError(
                    f"{self._queued} queries are waiting already, the limit is {self._max_queue}: try again shortly, "
                    "or add servers"
                )
            self._waiting.append(waiting)
            self._queued += len(queries)
            self._ready.notify()
        return waiting.future

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search together with whoever else is searching now; blocks until answered."""
        return self.submit(queries, k).result()

    def close(self) -> None:
        """Answer what waits, then stop."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _take(self) -> list[_Waiting]:
        """Wait for requests and take a batch of them; empty when closed."""
        with self._ready:
            while not self._waiting:
                if self._closed:
                    return []
                self._ready.wait()
            deadline = time.monotonic() + self._max_wait
            while self._queued < self._max_batch and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._ready.wait(left)
            batch: list[_Waiting] = []
            size = 0
            while self._waiting and (not batch or size + len(self._waiting[0].queries) <= self._max_batch):
                waiting = self._waiting.popleft()
                size += len(waiting.queries)
                if waiting.future.set_running_or_notify_cancel():
                    batch.append(waiting)
            self._queued -= size
            if self._waiting:
                self._ready.notify()
            return batch

    def _work(self) -> None:
        while True:
            batch = self._take()
            if batch:
                self._answer(batch)
            elif self._closed and not self._waiting:
                return

    def _answer(self, batch: list[_Waiting]) -> None:
        try:
            results = self._search_together(batch)
        except BaseException as error:
            if len(batch) > 1 and not isinstance(error, _TROUBLE_FOR_ALL):
                # One request may have spoiled it for all: each is tried by itself and answers for itself.
                for waiting in batch:
                    self._answer([waiting])
            else:
                for waiting in batch:
                    waiting.future.set_exception(error)
            return
        for waiting, result in zip(batch, results, strict=True):
            waiting.future.set_result(result)

    def _search_together(self, batch: list[_Waiting]) -> list[list[list[Passage]]]:
        """Search the distinct queries of a batch once, and deal the results out."""
        distinct = list(dict.fromkeys(query for waiting in batch for query in waiting.queries))
        if self._on_batch is not None:
            self._on_batch(sum(len(waiting.queries) for waiting in batch))
        found = self._current().search(distinct, max(waiting.k for waiting in batch)) if distinct else []
        if len(found) != len(distinct):
            raise RetrievalError(f"the retriever answered {len(found)} of {len(distinct)} queries: it is defective")
        by_query = dict(zip(distinct, found, strict=True))
        return [[by_query[query][: waiting.k] for query in waiting.queries] for waiting in batch]
