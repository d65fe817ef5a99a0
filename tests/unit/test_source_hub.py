"""The Hub, played by a local server that answers as the real one does, so that huggingface_hub raises its own
errors."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from linearize.errors import ModelError, NetworkError, UsageError
from linearize.source import resolve
from tests.checkpoints import save

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`answers` maps (path prefix) -> (status, headers); files are served from `files`."""

    def __init__(self):
        self.errors: dict[str, tuple[int, dict[str, str]]] = {}
        self.files: dict[str, bytes] = {}
        self.fetched: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                for part, (status, headers) in hub.errors.items():
                    if part in self.path:
                        return self.reply(status, b"{}", headers)
                if self.path.startswith("/api/models/") and "/tree/" in self.path:
                    rows = [
                        {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                        for name, data in hub.files.items()
                    ]
                    return self.reply(200, json.dumps(rows).encode())
                if self.path.startswith("/api/models/"):
                    siblings = [{"rfilename": name} for name in hub.files]
                    return self.reply(200, json.dumps({"id": "o/m", "sha": SHA, "siblings": siblings}).encode())
                name = self.path.split(f"/resolve/{SHA}/")[-1].split("?")[0]
                hub.fetched.append(name)
                data = hub.files[name]
                return self.reply(200, data, {"ETag": f'"{hash(name) & 0xFFFFFF:040x}"', "X-Repo-Commit": SHA})

            def reply(self, status, data, headers=None):
                self.send_response(status)
                for key, value in (headers or {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def refused(model, *says, error=NetworkError, revision=None):
    with pytest.raises(error) as caught:
        resolve(model, revision=revision)
    for text in says:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == error.exit_code


def test_a_model_is_downloaded_without_its_pickles_and_then_found_offline(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    for path in save(tmp_path / "m").iterdir():
        hub.files[path.name] = path.read_bytes()
    unwanted = [
        "pytorch_model.bin",
        "x.gguf",
        "original/consolidated.safetensors",
        "onnx/model.json",
        "README.md",
    ]
    hub.files |= dict.fromkeys([*unwanted, "LICENSE", "tokenizer.json"], b"x")
    source = resolve("o/m")
    assert source.origin == "hub"
    assert source.tensors.keys() == resolve(tmp_path / "m").tensors.keys()
    assert source.side_files.keys() == {"LICENSE", "tokenizer.json", "generation_config.json"}
    assert not set(unwanted) & set(hub.fetched)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("o/m").folder == source.folder
    refused("o/other", "'o/other' isn't (wholly) in the cache, and offline mode is on")


def test_a_gated_repository(hub):
    hub.errors["/api/models/o/m"] = (403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "no"})
    refused("o/m", "'o/m' is gated", f"Request access at {hub.url}/o/m", "hf auth login")


def test_a_repository_whose_files_are_gated(hub):
    hub.files["config.json"] = b"{}"
    hub.errors["/resolve/"] = (401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "no"})
    refused("o/m", "'o/m' is gated", f"Request access at {hub.url}/o/m", "hf auth login")


def test_a_missing_repository(hub):
    hub.errors["/api/models/"] = (401, {"X-Error-Code": "RepoNotFound"})
    refused("o/missing", "there is no model 'o/missing' on the Hub, or it is private", "no local folder")


def test_a_missing_revision(hub):
    hub.errors["/revision/v9"] = (404, {"X-Error-Code": "RevisionNotFound"})
    refused("o/m", "'o/m' has no revision 'v9'", revision="v9")


def test_a_bad_token(hub):
    hub.errors["/api/models/"] = (401, {"X-Error-Message": "Invalid credentials in Authorization header"})
    refused("o/m", "refuses access to 'o/m' (HTTP 401)", "hf auth login")


def test_a_hub_that_is_down(hub):
    hub.errors["/api/models/"] = (501, {})
    refused("o/m", "'o/m' can't be downloaded")


def test_no_connection(hub, monkeypatch):
    from huggingface_hub import constants

    hub.server.server_close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        refused("o/m", "'o/m' can't be downloaded", "isn't in the cache", "Check the connection")


def test_a_repository_without_safetensors(hub):
    hub.files |= {"pytorch_model.bin": b"x", "config.json": b'{"model_type": "llama"}'}
    refused("o/m", "'o/m' on the Hub", "has no safetensors weights", "pickle weights are not taken", error=ModelError)
    hub.files = {"pytorch_model.bin": b"x"}
    hub.errors["/nothing"] = (404, {})
    refused("o/n", "holds no config.json and no safetensors weights", error=ModelError)


def test_faults_of_a_hub_model_name_its_id_and_not_the_cache(hub, tmp_path):
    for path in save(tmp_path / "m", shards=True).iterdir():
        hub.files[path.name] = path.read_bytes()
    del hub.files["model-00002-of-" + next(name for name in hub.files if name.startswith("model-00001")).split("-")[-1]]
    with pytest.raises(ModelError, match=r"'o/m': model-00002-of-.* is missing") as caught:
        resolve("o/m")
    assert "cache" not in str(caught.value)
    assert "snapshots" not in str(caught.value)


def test_names_that_can_not_be_ids(hub):
    refused("a--b/c", "neither a local path nor a Hub id", error=UsageError)


def test_a_local_path_is_never_taken_for_a_hub_id(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("the network was touched")

    save(tmp_path / "my models" / "é")
    save(tmp_path / "owner" / "name")
    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.chdir(tmp_path)
    assert resolve("./my models/é").tensors
    assert resolve("owner/name").origin == "folder"
