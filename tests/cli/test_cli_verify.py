"""`kvguard verify` against a fake engine that says what real ones said."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvguard.cli.main import app
from kvguard.cli.sizes import human_bytes, parse_size
from kvguard.vocabulary import UsageError

SAMPLES = Path(__file__).parents[1] / "evidence" / "samples"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@contextmanager
def engine(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A fake engine on a free port; paths it does not know answer 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b"{}"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def said(sample: str, root: str, **changes: tuple[int, bytes]) -> dict[str, tuple[int, bytes]]:
    return {
        "/health": (200, b""),
        "/version": (200, b'{"version": "0.32.0"}'),
        "/v1/models": (200, json.dumps({"data": [{"id": "m", "root": root}]}).encode()),
        "/metrics": (200, (SAMPLES / f"{sample}.metrics").read_bytes()),
        **changes,
    }


def model(directory: Path, scheme: bool) -> str:
    """A checkpoint of SmolLM2's shape with one KV scale in it."""
    directory.mkdir()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "head_dim": 64,
    }
    if scheme:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "config_groups": {},
            "kv_cache_scheme": SCHEME,
        }
    (directory / "config.json").write_text(json.dumps(config))
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.0))
    return str(directory)


def policy(tmp_path: Path, dtype: str) -> str:
    path = tmp_path / "policy.yaml"
    path.write_text(f"kv_cache:\n  dtype: {dtype}\n")
    return str(path)


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, ["verify", *arguments], env={"VLLM_API_KEY": "", "COLUMNS": "300"})
    return result.exit_code, result.output, result.exception


def document(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, output, error = run(*arguments, "--json")
    assert error is None or isinstance(error, SystemExit), error
    return code, json.loads(output)


def test_the_trap_is_seen_from_outside(tmp_path: Path) -> None:
    root = model(tmp_path / "m", scheme=True)
    log = str(SAMPLES / "scheme-with-scales.log")
    with engine(said("scheme-with-scales", root)) as url:
        code, found = document(url, "--policy", policy(tmp_path, "bfloat16"), "--engine-log", log)
        shown_code, shown, _ = run(url, "--policy", policy(tmp_path, "bfloat16"), "--engine-log", log)
    assert (code, shown_code) == (3, 3)
    assert found["effective"]["dtype"] == "fp8_e4m3"
    assert found["effective"]["confidence"] == "corroborated"
    echoes = [c for c in found["claims"] if c["field"] == "kv_cache_dtype" and c["source"] in ("log", "metrics")]
    assert {c["source"] for c in echoes} == {"log", "metrics"}
    assert all(c["value"] is None and c["note"].startswith("auto: no information") for c in echoes)
    assert shown.count("auto: no information") >= 2
    assert "effective KV cache: fp8_e4m3, corroborated" in shown
    assert "11,523 bytes per token" in shown


def test_a_16_bit_engine_passes(tmp_path: Path) -> None:
    root = model(tmp_path / "m", scheme=False)
    with engine(said("plain", root)) as url:
        code, found = document(url, "--policy", policy(tmp_path, "16bit"), "--engine-log", str(SAMPLES / "plain.log"))
    assert (code, found["effective"]["dtype"], found["effective"]["scales"]) == (0, "bfloat16", "not_quantized")
    assert found["violated"] is False


def test_without_log_or_bytes_the_width_is_not_known(tmp_path: Path) -> None:
    root = model(tmp_path / "m", scheme=True)
    with engine(said("scheme-with-scales", root)) as url:
        code, found = document(url, "--policy", policy(tmp_path, "bfloat16"))
        given_code, given = document(url, "--policy", policy(tmp_path, "bfloat16"), "--kv-bytes", "1GiB")
    assert (code, found["effective"]["dtype"]) == (3, "unknown")
    assert "how many ranks there are is not known" in found["capacity"]["reason"]
    assert (given_code, given["effective"]["dtype"]) == (3, "fp8_e4m3")


def test_an_explicit_echo_without_a_checkpoint(tmp_path: Path) -> None:
    with engine(said("plain-fp8", "/nowhere/model")) as url:
        code, found = document(url, "--policy", policy(tmp_path, "fp8_e4m3"))
    assert (code, found["effective"]["confidence"]) == (3, "echoed")
    assert any("give --checkpoint" in note for note in found["notes"])


def test_a_checkpoint_may_be_given(tmp_path: Path) -> None:
    root = model(tmp_path / "m", scheme=False)
    with engine(said("plain-fp8", "/nowhere/model")) as url:
        code, found = document(url, "--policy", policy(tmp_path, "fp8"), "--checkpoint", root, "--kv-bytes", "1073741824")
    assert (code, found["effective"]["confidence"], found["checkpoint"]) == (0, "corroborated", root)


def test_sources_that_cannot_be_read_are_noted(tmp_path: Path) -> None:
    broken = {
        "/metrics": (200, b"<html>{{{"),
        "/version": (404, b""),
        "/v1/models": (401, b'{"error": "Unauthorized"}'),
    }
    with engine(said("plain", "x", **broken)) as url:
        code, found = document(url)
    assert code == 0
    notes = " / ".join(found["notes"])
    assert "metrics: metrics page line 1" in notes
    assert "give --api-key" in notes
    assert "neither /version nor the log" in notes


@pytest.mark.parametrize(
    ("health", "words"),
    [
        ((503, b"{}"), "/health answers HTTP 503"),
        (
            (404, b"<html><body>nothing here</body></html>"),
            "whose /health says 200 or 503: HTTP 404: an HTML page",
        ),
        (None, "no engine answers"),
    ],
)
def test_an_engine_that_is_not_there(tmp_path: Path, health: tuple[int, bytes] | None, words: str) -> None:
    if health is None:
        _, _, error = run(str(tmp_path / "none.sock"))
    else:
        with engine({"/health": health}) as url:
            _, _, error = run(url)
    assert isinstance(error, UsageError)
    assert words in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 1073741824),
        ("1GiB", 1073741824),
        ("1G", 1073741824),
        ("1.5 gib", 1610612736),
        ("24 GB", 24_000_000_000),
        ("10MiB", 10485760),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--kv-bytes") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1XB", "GiB", "1e9", "1 2", "9" * 40])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-bytes"):
        parse_size(text, "--kv-bytes")


def test_sizes_for_people() -> None:
    assert [human_bytes(n) for n in (23040, 1024**3, 5 * 1024**2)] == ["23,040 B", "1.00 GiB", "5.00 MiB"]
