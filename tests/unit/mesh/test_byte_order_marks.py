"""Files that commands read may begin with a byte order mark, as editors on Windows write them."""

import io
from codecs import BOM_UTF8
from pathlib import Path

import msgspec
import pytest

from ops.sim.profiles import DIRECTORY, load
from ops.sim.traces import checked_trace
from services.agent.attached.endpoints import endpoints_of
from services.agent.backends.settings import RemoteSettings
from services.mesh.batch.cli import endpoint_of
from services.mesh.cli import main
from services.mesh.submit import call_request
from services.mesh.verbs.cli_submit import SubmitOptions, _request
from shared.contracts.ingress import InferenceRequest
from shared.runtime.lifecycle import EXIT_OK
from shared.tenants.keys import digest_of_key, read_keys

MARK = BOM_UTF8.decode()
BODY = '{"model": "m", "prompt": "hi"}'


def marked(file: Path, text: str) -> Path:
    """Write *text* after a byte order mark."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(BOM_UTF8 + text.encode())
    return file


def test_keys_are_imported(tmp_path: Path):
    settings = marked(tmp_path / "gateway.json", '{"api_keys": {"sk-one": "acme"}}')
    keys = tmp_path / "keys.json"
    assert main(["keys", "import", str(settings), "--file", str(keys)]) == EXIT_OK

    (entry,) = read_keys(keys)
    assert (entry.tenant, entry.sha256) == ("acme", digest_of_key("sk-one"))


def test_the_first_line_of_a_batch_names_the_endpoint(tmp_path: Path):
    lines = marked(tmp_path / "lines.jsonl", '{"url": "/v1/completions"}\n{"url": "/v1/x"}\n')
    assert endpoint_of(lines) == "/v1/completions"


def test_bodies_and_prompts_are_submitted_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = marked(tmp_path / "body.json", BODY)
    for given in (f"@{file}", MARK + BODY):
        assert call_request("/v1/completions", given).body == msgspec.Raw(BODY.encode())

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{MARK}hello"))
    request = _request("-", SubmitOptions(model="m"))
    assert isinstance(request, InferenceRequest)
    assert request.prompt == "hello"


async def test_addresses_of_servers_are_read(tmp_path: Path):
    file = marked(tmp_path / "servers", "http://a:1\nhttp://b:2\n")
    found = await endpoints_of(RemoteSettings(url=f"file:{file}")).now()
    assert [each.url for each in found] == ["http://a:1", "http://b:2"]


def test_traces_and_profiles_of_simulations_are_read(tmp_path: Path):
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
    assert checked_trace(marked(tmp_path / "trace.csv", rows)).prompts == (374,)

    bundled = min(DIRECTORY.glob("*.json"))
    profile = marked(tmp_path / "profile.json", bundled.read_text())
    assert load(str(profile)) == load(bundled.stem)
