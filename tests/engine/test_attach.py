"""`kvguard attach` beside a plain `vllm serve`, by its Unix socket. By TCP, with its log, and swapped: test_drift_alert.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from beside import Beside, Plain


def test_by_its_socket_the_engine_tells_its_command(plain: Callable[..., Plain], model: Path, tmp_path: Path) -> None:
    """No log: its metrics have the bytes, the process behind the socket its parallel sizes."""
    socket = Path(f"/tmp/kvgt-attach-{os.getpid()}.sock")
    engine = plain(tmp_path / "engine.log", "--uds", str(socket), "--kv-cache-dtype", "fp8_e4m3")
    beside = Beside(tmp_path, str(socket))
    try:
        beside.wait("serving")
        assert beside.chat(model).headers["x-kvguard-kv-cache-dtype"] == "fp8_e4m3"
        predicate = beside.newest()
        requested = next(a for a in predicate["attributes"] if a["attribute"] == "requested")["value"]
        assert any(claim["field"] == "kv_cache_dtype" and claim["value"] == "fp8_e4m3" for claim in requested)
        assert beside.get("/metrics").text.count("kvguard_verification_stale 0.0") == 1
    finally:
        code = beside.stop()
        engine.kill()
        socket.unlink(missing_ok=True)
    assert code == 0
