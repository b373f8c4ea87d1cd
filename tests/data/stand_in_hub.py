"""A stand-in for the Hugging Face hub: enough of its HTTP interface to serve a data set.

It serves the repositories under a folder as `datasets` asks for them, so that the whole way from
`load_corpus("multi30k")` over the network into the cache and out of it is walked by a test.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "a" * 40
FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)")
TREE = re.compile(r"/api/datasets/([^/]+/[^/]+)/tree/[^/?]+/?([^?]*)")
ABOUT = re.compile(r"/api/datasets/([^/]+/[^/?]+)(/revision/|$)")


class Hub(BaseHTTPRequestHandler):
    """Answers for the repositories under `root`: files, listings, descriptions."""

    def __init__(self, root: Path, *connection) -> None:
        self.root = root
        super().__init__(*connection)

    def do_GET(self) -> None:
        if found := FILE.match(self.path):
            path = self.root / found[1] / found[2]
            return self.answer(path.read_bytes()) if path.is_file() else self.missing()
        if found := TREE.match(self.path):
            folder = self.root / found[1] / found[2]
            if not folder.is_dir():
                return self.missing()
            return self.answer(
                [self.entry(path, self.root / found[1]) for path in folder.iterdir()]
            )
        if (found := ABOUT.match(self.path)) and (self.root / found[1]).is_dir():
            names = [p.name for p in (self.root / found[1]).rglob("*") if p.is_file()]
            files = [{"rfilename": name} for name in names]
            about = {"_id": "1", "id": found[1], "sha": COMMIT, "siblings": files, "tags": []}
            return self.answer(about | {"private": False, "gated": False, "disabled": False})
        return self.missing("RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def entry(self, path: Path, repository: Path) -> dict:
        name = path.relative_to(repository).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40}
        return {"type": "file", "path": name, "oid": "0" * 40, "size": path.stat().st_size}

    def answer(self, content: bytes | list | dict) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def missing(self, code: str = "EntryNotFound") -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """Serve the repositories under `root` and hand out the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
