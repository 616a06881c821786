import gzip
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import faiss
import pytest

from memopd_env.retrieval import DenseRetriever, Passage
from memopd_env.retrieval import resources as machine
from memopd_env.retrieval.adopt import adopt
from memopd_env.retrieval.download import WIKI_CORPUS, WIKI_E5_INDEX, Downloader, Published
from memopd_env.retrieval.encoders import HashingEncoder
from memopd_env.retrieval.errors import DownloadError, NotEnoughDiskError

INDEX = Published("owner/index", ("part_aa", "part_ab"), "joined.index")


class Hub:
    """A hub's layout on loopback: resolve addresses redirect to a store that knows ranges, with faults on demand."""

    def __init__(self):
        self.files, self.faults, self.log, self.tokens = {}, [], [], []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self.answer(head=True)

            def do_GET(self):
                self.answer(head=False)

            def answer(self, head):
                hub.log.append((self.command, self.path, self.headers.get("range")))
                hub.tokens.append(self.headers.get("authorization"))
                kind, _, rest = self.path.lstrip("/").partition("/")
                name = rest.replace("resolve/main/", "")
                data = hub.files.get(name)
                if data is None:
                    return self.reply(404)
                if kind == "datasets":
                    return self.reply(
                        302,
                        {
                            "location": f"http://127.0.0.1:{hub.port}/store/{name}",
                            "x-linked-size": str(len(data)),
                            "x-linked-etag": f'"{hub.hashes.get(name, hashlib.sha256(data).hexdigest())}"',
                        },
                    )
                start = 0
                fault = hub.faults.pop(0) if hub.faults else None
                if fault == "500":
                    return self.reply(500)
                if self.headers.get("range") and fault != "no ranges":
                    start, stop = self.headers["range"].removeprefix("bytes=").split("-")
                    start, data = int(start), data[: int(stop) + 1]
                sent = data[start:]
                if fault == "flip":
                    sent = bytes([sent[0] ^ 1]) + sent[1:]
                self.send_response(206 if start or (self.headers.get("range") and fault != "no ranges") else 200)
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                if fault == "cut":
                    self.wfile.write(sent[: len(sent) // 2])
                    self.close_connection = True
                    self.connection.close()
                else:
                    self.wfile.write(sent)

            def reply(self, status, headers=None):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.hashes = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def downloader(self, **options):
        return Downloader(f"http://127.0.0.1:{self.port}", pause=0.001, timeout=5, **options)

    def fetched(self):
        return [
            (path.rsplit("/", 1)[1], span)
            for method, path, span in self.log
            if method == "GET" and path.startswith("/store/")
        ]


@pytest.fixture
def hub():
    hub = Hub()
    hub.files = {"owner/index/part_aa": os.urandom(300_000), "owner/index/part_ab": os.urandom(200_001)}
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def whole(hub):
    return b"".join(hub.files.values())


def test_parts_are_joined_into_one_checked_file(hub, whole, tmp_path):
    seen = []
    path = hub.downloader(progress=lambda *step: seen.append(step)).fetch(INDEX, tmp_path / "new")
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path / "new") == ["joined.index"]
    assert seen[-1] == ("joined.index", 500_001, 500_001)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_file_that_is_there_is_not_fetched_again(hub, whole, tmp_path):
    hub.downloader().fetch(INDEX, tmp_path)
    hub.log.clear()
    assert hub.downloader().fetch(INDEX, tmp_path).read_bytes() == whole
    assert hub.log == []


@pytest.mark.parametrize(
    "faults",
    [["cut"], ["cut", "cut", "500", "cut"], ["500"] * 5, ["no ranges"], ["cut", "no ranges"], [None, "cut", "500"]],
    ids=str,
)
def test_broken_transfers_go_on_at_the_last_byte(hub, whole, tmp_path, faults):
    hub.faults = list(faults)
    assert hub.downloader().fetch(INDEX, tmp_path).read_bytes() == whole
    assert os.listdir(tmp_path) == ["joined.index"]
    if faults == ["cut"]:
        assert hub.fetched()[1] == ("part_aa", "bytes=150000-299999")


def test_a_later_run_goes_on_where_an_earlier_one_was_stopped(hub, whole, tmp_path):
    def interrupt(name, done, total):
        if done > 350_000:
            raise KeyboardInterrupt

    hub.faults = [None, "cut"]
    with pytest.raises(KeyboardInterrupt):
        hub.downloader(progress=interrupt).fetch(INDEX, tmp_path)
    assert not (tmp_path / "joined.index").exists()
    hub.log.clear()
    hub.faults = []
    assert hub.downloader().fetch(INDEX, tmp_path).read_bytes() == whole
    assert [name for name, _ in hub.fetched()] == ["part_ab"]
    assert not hub.fetched()[0][1].startswith("bytes=0-")


def test_other_bytes_than_the_hub_states_are_fetched_again_once_and_then_refused(hub, whole, tmp_path):
    hub.faults = ["flip"]
    assert hub.downloader().fetch(INDEX, tmp_path / "a").read_bytes() == whole
    hub.hashes["owner/index/part_ab"] = "0" * 64
    with pytest.raises(DownloadError, match=r"part_ab came twice with another SHA-256"):
        hub.downloader().fetch(INDEX, tmp_path / "b")
    assert not (tmp_path / "b" / "joined.index").exists()


def test_a_hub_that_stays_broken_is_given_up_and_the_file_kept_for_later(hub, whole, tmp_path):
    hub.faults = ["cut"] + ["500"] * 20
    with pytest.raises(DownloadError, match=r"stopped at byte 150,000 of 300,000 .*run the same command again"):
        hub.downloader().fetch(INDEX, tmp_path)
    hub.faults = []
    hub.log.clear()
    assert hub.downloader().fetch(INDEX, tmp_path).read_bytes() == whole
    assert hub.fetched()[0] == ("part_aa", "bytes=150000-299999")


def test_a_file_that_changed_on_the_hub_is_not_mixed_with_the_old_one(hub, tmp_path):
    hub.faults = [None] + ["500"] * 20
    with pytest.raises(DownloadError):
        hub.downloader().fetch(INDEX, tmp_path)
    hub.faults = []
    hub.files = {name: os.urandom(len(data)) for name, data in hub.files.items()}
    assert hub.downloader().fetch(INDEX, tmp_path).read_bytes() == b"".join(hub.files.values())


def test_what_the_hub_does_not_have_is_said(hub, tmp_path):
    with pytest.raises(DownloadError, match="does not have this file"):
        hub.downloader().fetch(Published("owner/index", ("part_zz",), "x"), tmp_path)


def test_no_hub_is_said(tmp_path, port):
    with pytest.raises(DownloadError, match="cannot reach"):
        Downloader(f"http://127.0.0.1:{port}", pause=0.001).fetch(INDEX, tmp_path)


def test_a_small_disk_is_noticed_first(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: type("usage", (), {"free": 10}))
    with pytest.raises(NotEnoughDiskError, match=r"downloading joined.index"):
        hub.downloader().fetch(INDEX, tmp_path)
    assert hub.fetched() == []


def test_the_token_is_sent_to_the_hub(hub, tmp_path):
    hub.downloader(token="secret").fetch(INDEX, tmp_path)
    assert hub.tokens[0] == "Bearer secret"


def test_the_published_corpus_and_index_become_an_index_folder(hub, tmp_path):
    """The whole way at small size: two parts of a flat FAISS file and a packed corpus, as they are published."""
    rows = [Passage(str(row), f"Title {row}", f"text about thing {row}") for row in range(50)]
    encoder = HashingEncoder(32)
    index = faiss.IndexFlatIP(32)
    index.add(encoder.encode_passages([passage.contents for passage in rows]))
    data = faiss.serialize_index(index).tobytes()
    lines = "".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in rows)
    hub.files = {
        f"{WIKI_E5_INDEX.repository}/part_aa": data[:4000],
        f"{WIKI_E5_INDEX.repository}/part_ab": data[4000:],
        f"{WIKI_CORPUS.repository}/wiki-18.jsonl.gz": gzip.compress(lines.encode()),
    }
    hub.faults = ["cut", None, "500"]
    downloader = hub.downloader()
    corpus, joined = (downloader.fetch(wanted, tmp_path / "wiki") for wanted in (WIKI_CORPUS, WIKI_E5_INDEX))
    manifest = adopt(joined, corpus, tmp_path / "wiki", encoder=encoder, move=True)
    assert (manifest.kind, manifest.count, manifest.corpus.path) == ("flat", 50, "wiki-18.jsonl")
    assert DenseRetriever.open(tmp_path / "wiki").search(["thing 31"], 1)[0][0].id == "31"
    (tmp_path / "wiki").rename(tmp_path / "moved")
    assert DenseRetriever.open(tmp_path / "moved").search(["thing 32"], 1)[0][0].id == "32"
