"""Other ways in which a checkpoint asks for a quantized KV cache, under a 16-bit policy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from guarded import KVGUARD, Guarded

POLICY = "kv_cache: {dtype: 16bit, min_confidence: proven}"


def test_modelopt_scheme_is_made_sixteen_bit(guarded: Callable[..., Guarded]) -> None:
    served = guarded("modelopt", policy=POLICY).wait_ready()
    assert "change   --kv-cache-dtype bfloat16" in served.err
    assert served.effective().dtype == "bfloat16"
    assert "Paris" in served.chat().json()["choices"][0]["message"]["content"]


def test_a_bare_top_level_key_is_ignored_by_vllm_and_inspect_says_so(
    guarded: Callable[..., Guarded], variant: Callable[[str], Path]
) -> None:
    served = guarded("toplevel_key", policy=POLICY).wait_ready()
    assert served.effective().dtype == "bfloat16"
    assert served.effective().kv_tokens == 46592
    command = [KVGUARD, "inspect", str(variant("toplevel_key")), "--engine-version", "0.32.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "kv_cache_dtype" in done.stdout
    assert "ignored by vLLM" in " ".join(done.stdout.split())
    inspected = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=60)
    assert any("ignored by vLLM" in finding for finding in json.loads(inspected.stdout)["findings"])
