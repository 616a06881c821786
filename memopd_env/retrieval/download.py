"""Fetch the published Wikipedia corpus and its E5 index from a model hub.

Eighty gigabytes rarely come in one piece. So a file grows in place: parts follow one another in one file, a broken
transfer goes on at its last byte, every part is compared with the hash that the hub states, and only a whole file gets
its name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from memopd_env.retrieval.errors import DownloadError
from memopd_env.retrieval.files import sync, write_json
from memopd_env.retrieval.resources import check_disk

logger = logging.getLogger(__name__)

HUB = "https://huggingface.co"
_BLOCK = 1 << 20
_TRIES_WITHOUT_PROGRESS = 8
_MAX_PAUSE = 30.0


@dataclass(frozen=True)
class Published:
    """A file of a hub data set, perhaps cut into parts.

    Attributes:
        repository: ``owner/name``.
        parts: Files of the repository that make up the file, in order.
        name: What the joined file is called.
    """

    repository: str
    parts: tuple[str, ...]
    name: str


WIKI_CORPUS = Published("PeterJinGo/wiki-18-corpus", ("wiki-18.jsonl.gz",), "wiki-18.jsonl.gz")
WIKI_E5_INDEX = Published("PeterJinGo/wiki-18-e5-index", ("part_aa", "part_ab"), "e5_Flat.index")
WIKI_ENCODER = "e5:intfloat/e5-base-v2"


@dataclass(frozen=True)
class _Part:
    url: str
    size: int
    sha256: str


class Downloader:
    """Fetches files of one hub.

    Args:
        endpoint: The hub's address.
        token: For gated files.
        revision: Branch, tag or commit.
        pause: Seconds of the first pause after a failure; later ones grow.
        timeout: Seconds without a byte after which a transfer counts as broken.
        progress: Called with the file's name, bytes there and bytes in all.
    """

    def __init__(
        self,
        endpoint: str = HUB,
        *,
        token: str | None = None,
        revision: str = "main",
        pause: float = 1.0,
        timeout: float = 60.0,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._revision = revision
        self._pause = pause
        self._tell = progress or (lambda name, done, total: None)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # Redirects are followed by hand for the head request, whose first answer states the hash; httpx drops the
        # token when a redirect leaves the hub.
        self._client = httpx.Client(headers=headers, timeout=timeout)

    def fetch(self, wanted: Published, folder: str | Path) -> Path:
        """Fetch a file into a folder, or finish fetching it.

        Returns:
            The path of the whole file.

        Raises:
            DownloadError: If the hub cannot be reached, does not have the file, or keeps sending other bytes than it
                states.
            NotEnoughDiskError: If it would not fit.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / wanted.name
        if target.is_file():
            return target
        parts = [self._look_up(wanted.repository, name) for name in wanted.parts]
        partial, notes = folder / f".{wanted.name}.partial", folder / f".{wanted.name}.parts.json"
        total = sum(part.size for part in parts)
        there = partial.stat().st_size if partial.is_file() else 0
        check_disk(folder, max(0, total - there), f"downloading {wanted.name}")
        whole = _whole_parts(notes, parts)
        with open(partial, "r+b" if partial.is_file() else "w+b") as file:
            for number, part in enumerate(parts):
                base = sum(before.size for before in parts[:number])
                if number >= whole:
                    self._fetch_part(file, base, part, wanted.name, total)
                    write_json(notes, [done.sha256 for done in parts[: number + 1]])
            file.truncate(total)
        sync(partial)
        os.replace(partial, target)
        notes.unlink(missing_ok=True)
        sync(folder)
        return target

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _look_up(self, repository: str, name: str) -> _Part:
        """Size and hash of a hub file, from the headers that the hub sends before it redirects."""
        url = f"{self._endpoint}/datasets/{repository}/resolve/{self._revision}/{name}"

        def head() -> httpx.Response:
            return self._client.head(url, follow_redirects=False)

        response = self._persist(head, url)
        while response.is_redirect and "x-linked-etag" not in response.headers:
            # A renamed repository: the hub redirects within itself.
            moved = response.headers["location"]
            url = moved if moved.startswith("http") else self._endpoint + moved
            response = self._persist(head, url)
        if response.status_code >= 400:
            raise DownloadError(
                f"{url} answered {response.status_code}: "
                + (
                    "give a token with access (--token or HF_TOKEN)"
                    if response.status_code in (401, 403)
                    else "the hub does not have this file; check the repository and --revision"
                )
            )
        size = response.headers.get("x-linked-size", response.headers.get("content-length"))
        etag = response.headers.get("x-linked-etag", response.headers.get("etag", "")).strip('W/"')
        if size is None or not size.isdecimal():
            raise DownloadError(f"{url} does not state its size: is {self._endpoint} a hub?")
        return _Part(url, int(size), etag if len(etag) == 64 else "")

    def _persist(self, request: Callable[[], httpx.Response], url: str) -> httpx.Response:
        reason = ""
        for attempt in range(1, _TRIES_WITHOUT_PROGRESS + 1):
            try:
                response = request()
                if response.status_code < 500 and response.status_code != 429:
                    return response
                reason = f"status {response.status_code}"
            except httpx.TransportError as error:
                reason = repr(error)
            logger.warning("%s: %s, attempt %d", url, reason, attempt)
            if attempt < _TRIES_WITHOUT_PROGRESS:
                self._wait(attempt)
        raise DownloadError(f"cannot reach {url} ({reason}): check the network, or give another hub with --endpoint")

    def _wait(self, attempt: int) -> None:
        time.sleep(random.uniform(0.5, 1.0) * min(_MAX_PAUSE, self._pause * 2 ** (attempt - 1)))

    def _fetch_part(self, file: BinaryIO, base: int, part: _Part, name: str, total: int) -> None:
        for corrupt in range(2):
            digest = _hash_existing(file, base, part.size)
            self._transfer(file, base, part, name, total, digest)
            if not part.sha256 or digest.hexdigest() == part.sha256:
                return
            logger.warning("%s: other bytes than the hub states, fetching it again (%d)", part.url, corrupt + 1)
            file.truncate(base)
        raise DownloadError(
            f"{part.url} came twice with another SHA-256 than the hub states ({part.sha256}): a proxy on the way "
            "changes it, or the hub's copy is damaged; try another network or --endpoint"
        )

    def _transfer(self, file: BinaryIO, base: int, part: _Part, name: str, total: int, digest: hashlib._Hash) -> None:
        """Append what is missing of a part; the file ends where the part does."""
        failures = 0
        while (have := file.seek(0, os.SEEK_END) - base) < part.size:
            self._tell(name, base + have, total)
            headers = {"range": f"bytes={have}-{part.size - 1}", "accept-encoding": "identity"}
            reason = ""
            try:
                with self._client.stream("GET", part.url, headers=headers, follow_redirects=True) as response:
                    if response.status_code == 200 and have:
                        # A server that knows no ranges sends all of it again: skip what is there.
                        self._append(file, response, base, part.size, name, total, digest, skip=have)
                    elif response.status_code in (200, 206):
                        self._append(file, response, base, part.size, name, total, digest)
                    elif response.status_code < 500 and response.status_code not in (408, 416, 429):
                        raise DownloadError(f"{part.url} answered {response.status_code} in the middle: try again")
                    else:
                        reason = f"status {response.status_code}"
            except httpx.TransportError as error:
                reason = repr(error)
            progressed = file.seek(0, os.SEEK_END) - base > have
            failures = 0 if progressed else failures + 1
            if failures >= _TRIES_WITHOUT_PROGRESS:
                raise DownloadError(
                    f"{part.url} stopped at byte {have:,} of {part.size:,} ({reason or 'the connection ended'}): run "
                    "the same command again, it goes on from there"
                )
            if file.tell() - base < part.size:
                logger.warning(
                    "%s: %s at byte %d, going on", part.url, reason or "connection ended", file.tell() - base
                )
                self._wait(max(1, failures))
        self._tell(name, base + part.size, total)

    def _append(
        self,
        file: BinaryIO,
        response: httpx.Response,
        base: int,
        size: int,
        name: str,
        total: int,
        digest: hashlib._Hash,
        skip: int = 0,
    ) -> None:
        # As it arrives: blocks of a fixed size would lose what came before a connection broke.
        for block in response.iter_raw():
            fresh = block[skip:]
            skip = max(0, skip - len(block))
            # More than the part holds would run into the next.
            fresh = fresh[: base + size - file.tell()]
            file.write(fresh)
            digest.update(fresh)
            self._tell(name, file.tell(), total)


def _whole_parts(notes: Path, parts: Sequence[_Part]) -> int:
    """How many parts an earlier run has fetched and checked; none if the hub's files have changed since."""
    if not notes.is_file():
        return 0
    done = json.loads(notes.read_text(encoding="utf-8"))
    return len(done) if done == [part.sha256 for part in parts[: len(done)]] else 0


def _hash_existing(file: BinaryIO, base: int, size: int) -> hashlib._Hash:
    """Hash what is there of a part, and cut off what is there behind it."""
    digest = hashlib.sha256()
    there = min(max(0, file.seek(0, os.SEEK_END) - base), size)
    file.truncate(base + there)
    file.seek(base)
    while there > 0:
        block = file.read(min(_BLOCK, there))
        digest.update(block)
        there -= len(block)
    return digest
