"""Pushing an export to a hub on loopback."""

import base64
import http.server
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import searches
from file_servers import environment, serving


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload needs; `files` is what was committed."""

    files: dict[str, bytes]
    large: dict[str, bytes]
    asked: list[tuple[str, str | None]]
    refused = ""

    def do_POST(self) -> None:
        """Every request of an upload."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((f"{self.command} {self.path}", self.headers.get("Authorization")))
        here = f"http://{self.headers['Host']}"
        if self.refused and self.refused in self.path:
            return self.answer(403, {"error": "You are not allowed to do this"})
        if self.path == "/api/repos/create":
            self.asked.append((body.decode(), None))
            return self.answer(200, {"url": f"{here}/user/name"})
        if self.path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if self.path.endswith("/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{here}/put/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if self.path.startswith("/put/"):
            self.large[self.path.removeprefix("/put/")] = body
        if self.path.endswith("/commit/main"):
            self.commit(body)
            said = {"commitUrl": f"{here}/user/name/commit/1", "commitOid": "0" * 40}
            return self.answer(200, {**said, "success": True})
        return self.answer(200, {"errors": [], "warnings": []})

    do_PUT = do_POST

    def do_GET(self) -> None:
        """Nothing is there yet."""
        self.answer(404, {"error": "Repository not found"})

    def commit(self, body: bytes) -> None:
        """Take the files of a commit."""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.large[value["oid"]]

    def answer(self, status: int, said: dict[str, Any]) -> None:
        """One answer."""
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


def pushed(found: Path, to: Path, refused: str = "", **more: str) -> tuple[Any, type[Hub]]:
    """An export to a hub on loopback, in a process of its own, and what the hub has seen."""
    kind = type("Seen", (Hub,), {"files": {}, "large": {}, "asked": [], "refused": refused})
    with serving(kind) as address:
        done = subprocess.run(
            [sys.executable, "-m", "swarm.export", str(found), f"to={to}", "push_to_hub=user/name"],
            cwd=searches.ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=searches.environment(
                **environment(address, to.parent / "cache"), HF_HOME=str(to.parent), **more
            ),
        )
    return done, kind


def test_the_hub_gets_every_file_in_a_private_repository(tiny_pool: Path, tmp_path: Path) -> None:
    done, hub = pushed(tiny_pool / "amber", tmp_path / "mine", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    made = next(json.loads(said) for said, _ in hub.asked if said.startswith("{"))
    assert made.get("visibility") == "private" or made.get("private") is True
    assert ("POST /api/repos/create", "Bearer hf_secret") in hub.asked
    assert (
        "uploaded to the hub: http" in done.stdout and "hf_secret" not in done.stdout + done.stderr
    )
    assert "--lora-modules name=user/name" in hub.files["README.md"].decode()


def test_what_the_hub_refuses_is_one_line(tiny_pool: Path, tmp_path: Path) -> None:
    for refused in ("repos/create", "/commit/"):
        done, hub = pushed(tiny_pool / "amber", tmp_path / "mine", refused, HF_TOKEN="hf_secret")
        assert done.returncode == 1 and hub.files == {}
        line = done.stderr.splitlines()[-1]
        assert line.startswith("error: push_to_hub=user/name") and "403" in line
        assert "Traceback" not in done.stderr and "hf_secret" not in done.stderr
        assert (tmp_path / "mine" / "README.md").is_file()
    done, hub = pushed(tiny_pool / "amber", tmp_path / "other")
    assert "log in first" in done.stderr and not hub.asked and not (tmp_path / "other").exists()
