"""What the engine's own /metrics page says: the cache's description, and the figures that move.

The description is the front end's copy of the configuration. A worker that changed the dtype never tells it,
so `auto` there is no information, and `None` is a string.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO, cast

from prometheus_client.parser import text_fd_to_metric_families

from kvguard.facts.metric_names import all_series_names, label_note, series_names
from kvguard.vocabulary import Claim, Effective, Frozen, Json, Source, Stage, UsageError, canonical_dtype

MAX_PAGE = 16 * 1024 * 1024
"""Bytes of a metrics page that are read at most."""

INFO = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The series of the page that kvguard knows, by name."""

    series: Mapping[str, tuple[Sample, ...]]

    def first_named(self, meaning: str) -> tuple[str, tuple[Sample, ...]]:
        """The first present series of a meaning; ("", ()) when the engine exports none of its names."""
        for name in series_names(meaning):
            if samples := self.series.get(name):
                return name, samples
        return "", ()

    @property
    def engines(self) -> int | None:
        """How many data-parallel engines the page speaks of; None when it has no series of an engine."""
        engines = [name for name in self.series if name.startswith("vllm:")]
        if not engines:
            return None
        return len({sample.labels.get("engine", "0") for name in engines for sample in self.series[name]})


class Marks(Frozen):
    """What tells one run of an engine from the next: when its process began (Unix seconds), and a counter that only grows."""

    process_start: float | None = None
    generated_total: float | None = None

    def other_run(self, later: Marks) -> str:
        """Why `later` is of another run than this, "" when nothing says so."""
        if None not in (self.process_start, later.process_start) and self.process_start != later.process_start:
            return "its process began at another time"
        if self.generated_total is not None and later.generated_total is not None:
            return "its counters began again" if later.generated_total < self.generated_total else ""
        return ""


class EngineFigures(Frozen):
    """The engine's own figures over all its data-parallel engines. None: the engine does not say.

    Bytes for `kv_bytes_*`, tokens for `kv_tokens_*`. `kv_pinned_ratio` is the share of blocks that running
    requests hold, averaged over engines (evictable prefix blocks count as free).
    """

    kv_bytes_total: int | None = None
    kv_bytes_used: float | None = None
    bytes_per_token: float | None = None
    kv_tokens_total: int | None = None
    kv_tokens_used: float | None = None
    kv_pinned_ratio: float | None = None
    running: float | None = None
    waiting: float | None = None
    limit: int | None = None
    preemptions_total: float | None = None
    generated_total: float | None = None
    """Tokens generated since the engine started."""


def parse_metrics(text: str | bytes) -> MetricsPage:
    """Read a page in Prometheus' text format. UsageError names the line that is not in that format."""
    if len(text) > MAX_PAGE:
        raise UsageError(f"metrics page: {len(text)} bytes, more than {MAX_PAGE} that are read; is this vLLM's /metrics?")
    page = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    wanted = all_series_names()
    series: dict[str, list[Sample]] = {}
    at = 0

    def lines() -> Iterator[str]:
        nonlocal at
        for number, line in enumerate(page.split("\n"), 1):
            at = number
            yield line

    try:
        for family in text_fd_to_metric_families(cast("TextIO", lines())):
            for sample in family.samples:
                if sample.name in wanted:
                    series.setdefault(sample.name, []).append(Sample(dict(sample.labels), float(sample.value)))
    except Exception as error:  # the parser raises whatever its string handling runs into
        words = " ".join(str(error).split())[:120]
        raise UsageError(
            f"metrics page line {at}: not Prometheus text format ({type(error).__name__}: {words}); "
            "is this the engine's /metrics?"
        ) from None
    return MetricsPage({name: tuple(samples) for name, samples in series.items()})


def claims(page: MetricsPage) -> tuple[Claim, ...]:
    """What the cache's description says, one claim for each field and distinct value."""
    found: list[Claim] = []
    for labels in _descriptions(page):
        found += [_dtype_claim(labels)] if "cache_dtype" in labels else []
        found += _tokens_claim(labels, page.engines or 1)
        found += _block_claims(labels, page.engines or 1)
        if (size := _integer(labels.get("block_size"))) is not None:
            found.append(_claim("block_size", size, "block_size", label_note("block_size")))
        memory = _integer(labels.get("kv_cache_memory_bytes"))
        if memory is not None:
            found.append(_claim("kv_memory_bytes", memory, "kv_cache_memory_bytes", "one worker rank"))
        if (flag := _flag(labels.get("calculate_kv_scales"))) is not None:
            found.append(_claim("calculate_kv_scales", flag, "calculate_kv_scales"))
        if (skipped := labels.get("kv_cache_dtype_skip_layers")) not in (None, "None", "[]"):
            found.append(_claim("kv_cache_dtype_skip_layers", skipped, "kv_cache_dtype_skip_layers"))
    unique = {(claim.field, str(claim.value)): claim for claim in reversed(found)}
    return tuple(reversed(unique.values()))


def marks(page: MetricsPage) -> Marks:
    """The page's marks of its engine's run."""
    return Marks(
        process_start=_sum(page.first_named("process_start")[1]), generated_total=_sum(page.first_named("generated_total")[1])
    )


def gauges(page: MetricsPage, effective: Effective, limit: int | None) -> EngineFigures:
    """The moving figures. `limit` is max_num_seqs of one engine, None when it is not known."""
    engines = page.engines
    tokens = next((c.value for c in claims(page) if c.field == "kv_tokens" and c.value is not None), None)
    total = tokens * (engines or 1) if tokens is not None else effective.kv_tokens
    pinned = _ratio(page.first_named("kv_pinned_ratio")[1])
    kv_bytes = effective.kv_bytes
    if (engines or 1) > 1 and total is not None and effective.bytes_per_token is not None:
        kv_bytes = round(effective.bytes_per_token * total)
    return EngineFigures(
        kv_bytes_total=kv_bytes,
        kv_bytes_used=None if pinned is None or kv_bytes is None else pinned * kv_bytes,
        bytes_per_token=effective.bytes_per_token,
        kv_tokens_total=total,
        kv_tokens_used=None if pinned is None or total is None else pinned * total,
        kv_pinned_ratio=pinned,
        running=_sum(page.first_named("running")[1]),
        waiting=_sum(page.first_named("waiting")[1]),
        limit=None if limit is None else limit * (engines or 1),
        preemptions_total=_sum(page.first_named("preemptions_total")[1]),
        generated_total=marks(page).generated_total,
    )


def _descriptions(page: MetricsPage) -> list[Mapping[str, str]]:
    return [sample.labels for sample in page.first_named("cache_config_info")[1]]


def _dtype_claim(labels: Mapping[str, str]) -> Claim:
    value = labels["cache_dtype"]
    note = label_note("cache_dtype")
    if value in ("auto", "None", ""):
        return _claim("kv_cache_dtype", None, "cache_dtype", f"{value or 'empty'}: no information; {note}")
    return _claim("kv_cache_dtype", canonical_dtype(value), "cache_dtype", note)


def _tokens_claim(labels: Mapping[str, str], engines: int) -> list[Claim]:
    size = _integer(labels.get("kv_cache_size_tokens"))
    if size is not None:
        return [_claim("kv_tokens", size, "kv_cache_size_tokens", "tokens of one engine")]
    blocks, block_size = _integer(labels.get("num_gpu_blocks")), _integer(labels.get("block_size"))
    if blocks is None or block_size is None:
        return []
    note = f"tokens of one engine: {blocks} blocks × {block_size} ÷ {engines} engine(s)"
    return [_claim("kv_tokens", blocks * block_size // engines, "num_gpu_blocks", note)]


def _block_claims(labels: Mapping[str, str], engines: int) -> list[Claim]:
    """Blocks of one engine, blocks and tokens of its longest sequence (0.24.0+, which say how many such sequences fit)."""
    blocks, tokens = _integer(labels.get("num_gpu_blocks")), _integer(labels.get("kv_cache_size_tokens"))
    try:
        sequences = float(labels.get("kv_cache_max_concurrency", "nan"))
    except ValueError:
        return []
    if blocks is None or tokens is None or not (math.isfinite(sequences) and sequences > 0):
        return []
    # Tokens are rounded down, so the quotient lies just below the length.
    length = math.ceil(tokens / sequences - 1e-6)
    each, note = round(blocks // engines / sequences), "num_gpu_blocks ÷ engines ÷ kv_cache_max_concurrency"
    return [
        _claim("kv_blocks", blocks // engines, "num_gpu_blocks", f"blocks of one engine, ÷ {engines} engine(s)"),
        _claim("blocks_per_sequence", each, "kv_cache_max_concurrency", note),
        _claim("max_model_len", length, "kv_cache_max_concurrency", "kv_cache_size_tokens ÷ kv_cache_max_concurrency"),
    ]


def _claim(field: str, value: Json, label: str, note: str = "") -> Claim:
    where = f"metric {INFO} label {label}"
    return Claim(stage=Stage.OBSERVED, source=Source.METRICS, field=field, value=value, where=where, note=note)


def _integer(text: str | None) -> int | None:
    """A label's positive integer; `None`, empty, zero and anything else are no information."""
    if text is None or len(text) > 18 or not (text.isascii() and text.isdigit()):
        return None
    return int(text) or None


def _flag(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")


def _finite(samples: tuple[Sample, ...]) -> list[float] | None:
    """The values, or None when there are none, or one is negative or no number: part of a sum is not the sum."""
    values = [sample.value for sample in samples]
    return values if values and all(math.isfinite(value) and value >= 0 for value in values) else None


def _sum(samples: tuple[Sample, ...]) -> float | None:
    values = _finite(samples)
    return None if values is None else sum(values)


def _ratio(samples: tuple[Sample, ...]) -> float | None:
    """The mean of shares, None when one of them is no share (some engines report negative usage)."""
    values = _finite(samples)
    return sum(values) / len(values) if values and max(values) <= 1 else None
