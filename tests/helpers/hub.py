"""Local server that imitates the Hugging Face hub for one data set."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def local_hub(name: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """(endpoint, requests so far) of a hub that holds the data set `name` with these files (by name; no folders)."""
    asked: list[str] = []
    api, here = f"/api/datasets/{name}", f"/datasets/{name}/resolve/"

    def entry(path: str) -> dict:
        return {"type": "file", "oid": COMMIT, "size": len(files[path]), "path": path}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer_json([entry(path) for path in body["paths"] if path in files])

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            asked.append(f"{self.command} {path}")
            if path == api or path.startswith(f"{api}/revision/"):
                siblings = [{"rfilename": file, "size": len(files[file])} for file in files]
                keys = {"lastModified": "2026-01-01T00:00:00.000Z", "private": False, "downloads": 0, "likes": 0}
                self.answer_json(
                    {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "disabled": False, **keys}
                )
            elif path == f"{api}/tree/{COMMIT}":
                self.answer_json([entry(file) for file in files])
            elif path.startswith(here) and path.removeprefix(here).partition("/")[2] in files:
                self.answer(files[path.removeprefix(here).partition("/")[2]])
            else:
                self.answer(b"{}", 404)

        def answer_json(self, content: object) -> None:
            self.answer(json.dumps(content).encode(), kind="application/json")

        def answer(self, content: bytes, status: int = 200, kind: str = "application/octet-stream") -> None:
            self.send_response(status)
            headers = {"Content-Length": len(content), "Content-Type": kind, "ETag": f'"{COMMIT}-{len(content)}"'}
            if status == 404:
                headers["X-Error-Code"] = "EntryNotFound"
            for key, value in {**headers, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
