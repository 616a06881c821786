"""Search in Qdrant, for corpora that outgrow one machine.

A Qdrant cluster shards and replicates by itself; this file only turns passages into points and answers into passages.
Points are numbered by row and carry the passage, so no corpus file is needed where the search runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from memopd_env.errors import MissingExtraError
from memopd_env.retrieval.base import Passage
from memopd_env.retrieval.encoders import Encoder, checked, load_encoder
from memopd_env.retrieval.errors import (
    BadReplyError,
    BrokenIndexError,
    RetrieverTimeoutError,
    RetrieverUnreachableError,
)

_BATCH = 256


class QdrantRetriever:
    """Nearest passages in a Qdrant collection; safe to call from several threads.

    Args:
        location: ``http://host:6333`` of a server, a folder for a local database, or ``:memory:``.
        collection: Name of the collection.
        encoder: The encoder, or its name; the one that made the collection's vectors.
        api_key: For a server that wants one.
        timeout: Seconds for a request.

    Raises:
        MissingExtraError: If the client is not installed.
    """

    def __init__(
        self,
        location: str,
        collection: str = "memopd",
        *,
        encoder: Encoder | str = "hash",
        api_key: str | None = None,
        timeout: int = 30,
    ) -> None:
        try:
            from qdrant_client import QdrantClient
        except ImportError as error:
            raise MissingExtraError("qdrant-client", "qdrant") from error
        self.encoder = load_encoder(encoder) if isinstance(encoder, str) else encoder
        self._collection = collection
        self._name = f"Qdrant collection {collection!r} at {location}"
        if location == ":memory:":
            self._client = QdrantClient(":memory:")
        elif location.startswith(("http://", "https://")):
            self._client = QdrantClient(url=location, api_key=api_key, timeout=timeout)
        else:
            self._client = QdrantClient(path=location)

    def upload(self, passages: Iterable[Passage], *, shards: int | None = None, replicas: int | None = None) -> int:
        """Make the collection and fill it, a batch at a time; uploading again replaces what is there by row.

        Args:
            passages: In the order of rows; e.g. an open corpus.
            shards: Shards of a new collection, for a cluster.
            replicas: Copies of each shard, for a cluster.

        Returns:
            How many were uploaded.
        """
        from qdrant_client import models

        with _typed(self._name):
            if not self._client.collection_exists(self._collection):
                self._client.create_collection(
                    self._collection,
                    vectors_config=models.VectorParams(size=self.encoder.dim, distance=models.Distance.DOT),
                    shard_number=shards,
                    replication_factor=replicas,
                )
        self._check()
        source = iter(passages)
        row = 0
        while batch := list(islice(source, _BATCH)):
            texts = [passage.contents for passage in batch]
            vectors = checked(self.encoder.encode_passages(texts), texts, self.encoder)
            points = [
                models.PointStruct(
                    id=row + number,
                    vector=vectors[number].tolist(),
                    payload={"id": passage.id, "contents": passage.contents},
                )
                for number, passage in enumerate(batch)
            ]
            with _typed(self._name):
                self._client.upsert(self._collection, points, wait=True)
            row += len(batch)
        return row

    def __len__(self) -> int:
        with _typed(self._name):
            return self._client.count(self._collection).count

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return for each query the ``k`` nearest passages, best first; equal scores in the order of rows.

        Raises:
            RetrieverUnreachableError: If the server does not answer.
            RetrieverTimeoutError: If it does not answer in time.
            BrokenIndexError: If there is no such collection.
            BadReplyError: If a point carries no passage.
        """
        from qdrant_client import models

        if not queries or k < 1:
            return [[] for _ in queries]
        texts = list(queries)
        vectors = checked(self.encoder.encode_queries(texts), texts, self.encoder)
        requests = [models.QueryRequest(query=vector.tolist(), limit=k, with_payload=True) for vector in vectors]
        with _typed(self._name):
            replies = self._client.query_batch_points(self._collection, requests)
        return [
            [self._passage(point) for point in sorted(reply.points, key=lambda point: (-point.score, point.id))]
            for reply in replies
        ]

    def close(self) -> None:
        """Close the connection, or the local database."""
        self._client.close()

    def _passage(self, point: Any) -> Passage:
        payload = point.payload or {}
        if not isinstance(payload.get("id"), str) or not isinstance(payload.get("contents"), str):
            raise BadReplyError(f"point {point.id} of {self._name} carries no passage: fill it with upload()")
        return Passage.from_contents(payload["id"], payload["contents"], float(point.score))

    def _check(self) -> None:
        with _typed(self._name):
            vectors: Any = self._client.get_collection(self._collection).config.params.vectors
        size = vectors.size
        if size != self.encoder.dim:
            raise BrokenIndexError(
                f"{self._name} holds vectors of {size} numbers and encoder {self.encoder.name!r} gives "
                f"{self.encoder.dim}: use the encoder that made it, or another collection"
            )


class _typed:
    """Turn the client's exceptions into this project's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

        if isinstance(error, ResponseHandlingException):
            reason = str(error.source)
            if "timed out" in reason or "timeout" in reason.lower():
                raise RetrieverTimeoutError(f"{self._name} did not answer in time: raise timeout") from error
            raise RetrieverUnreachableError(f"cannot reach {self._name} ({reason}): is the server up?") from error
        if isinstance(error, UnexpectedResponse) or (isinstance(error, ValueError) and "not found" in str(error)):
            raise BrokenIndexError(
                f"{self._name} refused the request ({str(error).splitlines()[0]}): make it with upload() first"
            ) from error
