"""Servers on the loopback for the tests: a folder's files, and as much of the hub as is needed."""

import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    """The address of a loopback server with this request handler."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def folder(path: Path) -> Any:
    """A handler that serves a folder's files."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(path))

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    return Handler


def hub(repositories: Mapping[str, Mapping[str, bytes] | str], asked: list[str]) -> Any:
    """A handler that is a hub with these repositories' files; "gated" instead of files refuses.

    Every path that is asked for goes into `asked`.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """A listing or a file."""
            path = self.path.split("?")[0]
            asked.append(path)
            found = re.fullmatch(r"/(?:api/models/)?(\w+/[\w-]+)(/resolve/\w+/)?(.*)", path)
            files = repositories.get(found[1]) if found else None
            if found is None or files is None:
                return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if isinstance(files, str):
                return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            if found[3].startswith("/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in files.items()
                ]
                return self.send(200, json.dumps(tree).encode(), {})
            if not found[2]:
                listing = {"id": found[1], "sha": "0" * 40}
                siblings = [{"rfilename": name} for name in files]
                return self.send(200, json.dumps(listing | {"siblings": siblings}).encode(), {})
            data = files[found[3]]
            return self.send(200, data, {"ETag": f'"{found[3]}-{len(data)}"'})

        do_HEAD = do_GET

        def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            """One answer; a HEAD gets its headers alone."""
            self.send_response(status)
            always = {"X-Repo-Commit": "0" * 40, "Content-Length": str(len(data))}
            for key, value in {**always, **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    return Handler


def environment(address: str, cache: Path) -> dict[str, str]:
    """The variables under which the hub's client talks to the loopback."""
    return {
        "HF_ENDPOINT": address,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
