"""A hub on loopback: what huggingface-hub 1.33 to 2.4 asks of the real one, and every way it can fail.

Two servers: the hub itself, and a "CDN" of another origin that serves large files, because the client treats
the two differently (redirects, and no token for the CDN). Served are model info (`/api/models/ID[/revision/R]`
with `blobs`), the file tree, and `/ID/resolve/R/FILE` with ETag, commit header, redirect for `.safetensors`
and byte ranges. Anything else is 404.

    with StubHub() as hub:
        hub.add("acme/tiny", folder)          # one commit: its files; revision "main"
        hub.token = "hf_good"; hub.gated.add("acme/tiny")
        hub.drop("model.safetensors", after=1000, times=2)
        hub.fail("/resolve/", 503, times=1)

`use(monkeypatch, hub, cache)` points the hub library of this process at it; `environment(hub, cache)` gives
the variables for a child process. `hub.log` holds (method, path, Range header, Authorization header).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


@dataclass
class Fault:
    """Something that goes wrong with answers whose path contains `part`, the next `times` times."""

    part: str
    times: int
    status: int = 0  # answer with this instead
    headers: dict[str, str] | None = None
    body: bytes = b""
    after: int = -1  # end the connection after that many bytes of the body
    reset: bool = False  # ... with a TCP reset instead of a plain close
    short: int = -1  # claim to be complete after that many bytes
    flip: bool = False  # one wrong bit in the body
    wait: threading.Event | None = None  # send nothing after `after` bytes until this is set
    begun: threading.Event = field(default_factory=threading.Event)  # it has begun to wait


class StubHub:
    """The stub; a context manager. `url` is what HF_ENDPOINT must be."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}  # id -> commit -> name -> bytes
        self.refs: dict[tuple[str, str], str] = {}  # (id, branch) -> commit
        self.moved: dict[str, str] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.token: str | None = None  # the only one that is accepted
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str, str | None, str | None]] = []
        self.lock = threading.Lock()
        self._servers = [_serve(self, cdn=False), _serve(self, cdn=True)]
        # another name, not only another port: release 1.33 compares names alone
        self.url = f"http://127.0.0.1:{self._servers[0].server_address[1]}"
        self.cdn_url = f"http://localhost:{self._servers[1].server_address[1]}"

    def __enter__(self) -> StubHub:
        return self

    def __exit__(self, *raised: object) -> None:
        for fault in self.faults:
            if fault.wait is not None:
                fault.wait.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, repo_id: str, files: Path | dict[str, bytes], branch: str = "main") -> str:
        """Publish a commit of these files (a folder, or name -> bytes); return its hash."""
        if isinstance(files, Path):
            files = {
                p.relative_to(files).as_posix(): p.read_bytes()
                for p in sorted(files.rglob("*"))
                if p.is_file()
            }
        digest = hashlib.sha1(repo_id.encode())
        for name in sorted(files):
            digest.update(name.encode() + b"\0" + files[name])
        commit = digest.hexdigest()
        self.repos.setdefault(repo_id, {})[commit] = dict(files)
        self.refs[repo_id, branch] = commit
        return commit

    def pin(self, repo_id: str, commit: str) -> None:
        """Let the newest commit of `main` have this hash too."""
        self.repos[repo_id][commit] = self.repos[repo_id][self.refs[repo_id, "main"]]
        self.refs[repo_id, "main"] = commit

    def drop(
        self, part: str, *, after: int, times: int = 1, reset: bool = False, stall: bool = False
    ) -> Fault:
        """End the connection after so many bytes (or, with `stall`, fall silent until the stub ends)."""
        wait = threading.Event() if stall else None
        self.faults.append(Fault(part, times, after=after, reset=reset, wait=wait))
        return self.faults[-1]

    def fail(
        self, part: str, status: int, *, times: int = 10**9, body: bytes = b"", **headers: str
    ) -> None:
        """Answer with this status; header names are written with _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults.append(Fault(part, times, status=status, headers=named, body=body))

    def short(self, part: str, length: int, *, times: int = 10**9) -> None:
        """Serve a file cut to `length` bytes as if that were all."""
        self.faults.append(Fault(part, times, short=length))

    def corrupt(self, part: str, *, times: int = 10**9) -> None:
        """Serve a file of the right length with one wrong bit."""
        self.faults.append(Fault(part, times, flip=True))

    def requests(self, part: str = "", method: str = "") -> int:
        """How many requests had `part` in their path."""
        return sum(part in path and method in ("", verb) for verb, path, _, _ in self.log)

    def take_fault(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.part in path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


def environment(hub: StubHub, cache: Path) -> dict[str, str]:
    """The variables that make a child process use the stub and nothing else."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache / "home"),
        "HF_HUB_CACHE": str(cache),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def use(monkeypatch: pytest.MonkeyPatch, hub: StubHub | str, cache: Path) -> None:
    """Point the hub library of this process, imported already or not, at the stub and an own cache."""
    from huggingface_hub import close_session, constants

    url = hub if isinstance(hub, str) else hub.url
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.devnull)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    close_session()


def _serve(hub: StubHub, cdn: bool) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"hub": hub, "cdn": cdn})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StubHub
    cdn: bool

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        where = ("/cdn" if self.cdn else "") + path
        fault = self.hub.take_fault(f"{where} {self.command}")
        self.hub.log.append(
            (self.command, where, self.headers.get("Range"), self.headers.get("Authorization"))
        )
        if fault is not None and fault.status:
            self.send(fault.status, fault.body, fault.headers or {})
        elif self.cdn:
            self.blob(path, fault)
        elif path.startswith("/api/models/"):
            self.api(path.removeprefix("/api/models/"), parts.query)
        elif "/resolve/" in path:
            repo_id, _, rest = path[1:].partition("/resolve/")
            self.resolve(repo_id, *rest.split("/", 1), fault)
        else:
            self.send(404, b"not here")

    def api(self, path: str, query: str) -> None:
        words = path.split("/")
        repo_id, revision = "/".join(words[:2]), "main"
        if repo_id in self.hub.moved:
            target = "/".join([self.hub.moved[repo_id], *words[2:]])
            return self.send(307, b"", {"Location": f"/api/models/{target}?{query}"})
        if len(words) >= 4 and words[2] in ("revision", "tree"):
            revision = words[3]
        commit = self.find(repo_id, revision, gate=False)
        if commit is None:
            return None
        files = self.hub.repos[repo_id][commit]
        if len(words) > 2 and words[2] == "tree":
            tree = [
                {"type": "file", "path": n, "size": len(b), "oid": git_oid(b), **lfs(n, b, "oid")}
                for n, b in files.items()
            ]
            return self.send(200, json.dumps(tree).encode())
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in files]
        if "blobs" in parse_qs(query):
            for entry in siblings:
                name, body = entry["rfilename"], files[entry["rfilename"]]
                entry |= {"size": len(body), "blobId": git_oid(body), **lfs(name, body, "sha256")}
        gated = "manual" if repo_id in self.hub.gated else False
        info = {"_id": commit[:24], "id": repo_id, "modelId": repo_id, "sha": commit}
        info |= {"private": False, "gated": gated, "siblings": siblings}
        return self.send(200, json.dumps(info).encode(), {"X-Repo-Commit": commit})

    def resolve(self, repo_id: str, revision: str, name: str, fault: Fault | None) -> None:
        if repo_id in self.hub.moved:
            target = f"/{self.hub.moved[repo_id]}/resolve/{revision}/{name}"
            return self.send(307, b"", {"Location": target})
        commit = self.find(repo_id, revision, gate=True)
        if commit is None:
            return None
        body = self.hub.repos[repo_id][commit].get(name)
        if body is None:
            return self.refuse(404, "EntryNotFound", "Entry not found", commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_oid(body)}"'}
        if not is_lfs(name):
            return self.body(body, headers, fault)
        sha256 = hashlib.sha256(body).hexdigest()
        headers |= {
            "Location": f"{self.hub.cdn_url}/{repo_id}/{commit}/{name}?Signature=abc",
            "X-Linked-Size": str(len(body)),
            "X-Linked-ETag": f'"{sha256}"',
        }
        return self.send(302, b"", headers)

    def blob(self, path: str, fault: Fault | None) -> None:
        org, repo, commit, name = path[1:].split("/", 3)
        body = self.hub.repos[f"{org}/{repo}"][commit][name]
        self.body(body, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, fault)

    def find(self, repo_id: str, revision: str, *, gate: bool) -> str | None:
        """The commit, or None after the refusal was sent."""
        sent = self.headers.get("Authorization")
        if sent is not None and sent != f"Bearer {self.hub.token}":
            self.refuse(401, None, "Invalid credentials in Authorization header")
            return None
        hidden = repo_id in self.hub.private and sent is None
        if repo_id not in self.hub.repos or hidden:
            self.refuse(401 if sent is None else 404, "RepoNotFound", "Repository not found")
            return None
        commit = self.hub.refs.get((repo_id, revision), revision)
        if commit not in self.hub.repos[repo_id]:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        if gate and repo_id in self.hub.gated:
            self.refuse(
                403 if sent else 401, "GatedRepo", f"Access to model {repo_id} is restricted."
            )
            return None
        return commit

    def refuse(
        self, status: int, code: str | None, message: str, commit: str | None = None
    ) -> None:
        headers = {"X-Error-Message": message}
        if code is not None:
            headers["X-Error-Code"] = code
        if commit is not None:
            headers["X-Repo-Commit"] = commit
        self.send(status, message.encode(), headers)

    def body(self, body: bytes, headers: dict[str, str], fault: Fault | None) -> None:
        if fault is not None and fault.flip:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault is not None and fault.short >= 0 and self.command == "GET":
            body = body[: fault.short]
        start, status = 0, 200
        asked = self.headers.get("Range")
        if asked is not None:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            if start >= len(body):
                return self.send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            status = 206
            headers = headers | {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
        self.send(status, body[start:], headers | {"Accept-Ranges": "bytes"}, fault)

    def send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        fault: Fault | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is None or fault.after < 0:
            try:
                self.wfile.write(body)
            except OSError:
                pass  # the client has left
            return
        self.wfile.write(body[: fault.after])
        self.wfile.flush()
        if fault.wait is not None:
            fault.begun.set()
            fault.wait.wait()
        if fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR) if not fault.reset else self.connection.close()


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".gguf"))


def git_oid(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def lfs(name: str, body: bytes, key: str) -> dict[str, Any]:
    if not is_lfs(name):
        return {}
    sha256 = hashlib.sha256(body).hexdigest()
    return {"lfs": {key: sha256, "size": len(body), "pointerSize": 134}}
