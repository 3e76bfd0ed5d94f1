"""README.md of the chart, from values.yaml's comments."""

from __future__ import annotations

import json

from chart_values import Entry, leaves

_HEAD = """# kvguard: the Helm chart

vLLM behind kvguard: the KV cache that runs is proven from its tensors before a request is served, and refused when it is not
what the policy says. Generated from `values.yaml` by `python deploy/generate`.

```console
$ helm install llama helm/kvguard --set model.name=Qwen/Qwen3-8B \\
    --set policy.kv_cache.dtype=fp8_e4m3 --set policy.kv_cache.scales=unit
```

The images must be where your nodes can pull them (`kvguard.image`, `engine.image`): build kvguard's with the repository's
`Dockerfile`. What was tried and what was not: [docs/kubernetes.md](../../docs/kubernetes.md).

## Values

| key | default | meaning |
|---|---|---|
"""


def chart_readme(entries: tuple[Entry, ...]) -> str:
    """The page. Every value is a row."""
    rows = [f"| `{entry.name}` | {_default(entry)} | {_cell(entry.doc)} |" for entry in leaves(entries)]
    return _HEAD + "\n".join(rows) + "\n"


def _default(entry: Entry) -> str:
    return f"`{json.dumps(entry.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
