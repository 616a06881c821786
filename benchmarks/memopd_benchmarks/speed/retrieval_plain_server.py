"""The retriever server that the field runs today, as it is described: one request is one encode and one search.

Run ``python -m memopd_benchmarks.speed.retrieval_plain_server INDEX PORT``. Everything happens in an ``async`` handler,
that is, on the event loop, so requests wait for one another. It exists to be compared with; do not serve it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from memopd_env.retrieval import DenseRetriever


class Query(BaseModel):
    """A request of the field's clients."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def create_app(index: Path) -> FastAPI:
    """The plain server over an index folder, with the same encoder, vectors and passages as the real one."""
    app = FastAPI()
    retriever = DenseRetriever.open(index)

    @app.post("/retrieve")
    async def retrieve(request: Query) -> dict[str, Any]:
        vectors = retriever.encoder.encode_queries(request.queries)
        found = retriever.search_vectors(vectors, request.topk or 3)
        return {
            "result": [
                [
                    {"document": {"id": passage.id, "contents": passage.contents}, "score": passage.score}
                    for passage in passages
                ]
                for passages in found
            ]
        }

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    return app


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("index", type=Path)
    parser.add_argument("port", type=int)
    given = parser.parse_args()
    uvicorn.run(create_app(given.index), host="127.0.0.1", port=given.port, log_level="warning", backlog=4096)


if __name__ == "__main__":
    main()
