"""The wrapper's container under the conditions of its pod (see sandbox.py): it starts, serves, keeps its record and drains."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from charts import container, merged, one, with_least
from sandbox import command, why_not
from watching import free_port

from checkpoint_fakes import SMOLLM2, write
from fake_engine import TESTS, install
from guarded import KVGUARD

LIMIT = 180.0
REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


def ask(port: int, path: str) -> httpx.Response | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=60)
    except httpx.HTTPError:
        return None


class Pod:
    """The engine's container of a rendered pod, with the engine in miniature as its vLLM."""

    def __init__(self, directory: Path, policy: dict[str, object]) -> None:
        self.port, self.management = free_port(), free_port()
        vllm = install(directory / "engine")
        write(directory / "model", SMOLLM2, {}, tokenizer_config__json='{"chat_template": "{{ messages }}"}')
        values = {
            "model": {"name": "", "source": "pvc", "pvc": {"claim": "models"}},
            "engine": {"gpus": 0},
            "management": {"port": self.management},
            "policy": policy,
            "drain": {"settle": 0, "grace": 60},
        }
        manifests = with_least(merged(values))
        spec = one(manifests, "Deployment")["spec"]["template"]["spec"]
        (directory / "policy").mkdir()
        text = one(manifests, "ConfigMap")["data"]["policy.yaml"]
        (directory / "policy" / "policy.yaml").write_text(text, "utf-8")
        self.log = directory / "termination-log"
        self.log.touch()
        self.log.chmod(0o666)
        args = [str(self.port) if word == "8000" else word for word in container(spec, "vllm")["args"]]
        path = f"{vllm.parent}:/usr/bin:/bin"
        words = command(
            spec,
            "vllm",
            [KVGUARD, *args],
            volumes={"model": directory / "model", "policy": directory / "policy"},
            seen=[directory / "engine"],
            log=self.log,
            more={
                **{"PATH": path, "PYTHONPATH": f"{directory / 'engine' / 'site'}:{TESTS}", "LANG": "C.UTF-8"},
                "FAKE_VLLM_NOTES": "/tmp",
            },
        )
        self.err = (directory / "err").open("wb")
        self.errors = directory / "err"
        self.process = subprocess.Popen(words, stdout=self.err, stderr=self.err, start_new_session=True)

    def until(self, state: str) -> None:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.errors.read_text("utf-8", "replace")
            answer = ask(self.management, "/readyz")
            if answer is not None and answer.json()["state"] == state:
                return
            time.sleep(0.05)
        raise AssertionError(self.errors.read_text("utf-8", "replace"))

    def seen_inside(self, place: str) -> Path:
        """A place under the container's own root."""
        return Path("/proc", str(self.process.pid), "root", place)

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self.err.close()


def test_it_serves_and_drains(tmp_path):
    tmp_path.chmod(0o755)
    pod = Pod(tmp_path, {"kv_cache": {"dtype": "fp8_e4m3"}})
    try:
        pod.until("serving")
        body = {"model": "rel-kvguard", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        url = f"http://127.0.0.1:{pod.port}/v1/chat/completions"
        answer = httpx.post(url, json=body, trust_env=False, timeout=120)
        assert answer.headers["x-kvguard-kv-cache-dtype"] == "fp8_e4m3"
        record = ask(pod.management, "/record")
        assert record is not None
        assert record.status_code == 200
        assert pod.seen_inside("var/lib/kvguard/kvguard/records").is_dir()
        assert Path(f"/proc/{pod.process.pid}/status").read_text().split("Uid:")[1].split()[:2] == ["65532", "65532"]
    finally:
        code = pod.stop()
    text = pod.errors.read_text("utf-8", "replace")
    assert code == 0, text
    assert "Read-only file system" not in text
    assert "Permission denied" not in text


def test_a_refusal_is_remembered_and_in_the_termination_message(tmp_path):
    tmp_path.chmod(0o755)
    pod = Pod(tmp_path, {"kv_cache": {"dtype": "fp8_e4m3"}, "engine": {"attention_backend": "FLASH_ATTN"}})
    try:
        pod.until("refused")
        kept = list(pod.seen_inside("var/lib/kvguard-refusals").glob("*.json"))
        assert [json.loads(path.read_text())["checks"][0]["name"] for path in kept] == ["attention_backend"]
    finally:
        pod.stop()
    assert "attention_backend" in pod.log.read_text("utf-8")
