"""What the engine's start-up log says, read as it is written.

A log can be turned off, reformatted or filtered, so an absent line proves nothing, and `auto` in a line is
no information. What is read here is an echo at best.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvguard.evidence.log_text import Message, interesting, messages
from kvguard.facts.failures import known_failure
from kvguard.facts.log_lines import LogLine, log_lines, request_log_files
from kvguard.facts.versions import in_range
from kvguard.vocabulary import Claim, Json, Source, Stage, canonical_dtype

MAX_LINE = 64 * 1024
"""Bytes kept of one line; the rest of a longer line is not read."""

_MAX_FINDINGS = 2048
_MAX_ERRORS = 200
_SHOWN_ERRORS = 5
_GIB = 1024**3
_MLA_DRAFT_VERSIONS = "0.26.0..0.32.0"
_OLD_BLOCK_SIZE = 16
_DEATHS = re.compile(r"died unexpectedly|EngineCore encountered|Engine core initialization failed")
_POINTERS = re.compile(r"See (?:root cause|stack trace) \(?above", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Finding:
    line: int
    stream: str
    process: str
    candidates: tuple[tuple[LogLine, str, str], ...]
    """Templates of one field that match: (template, value group, layer group)."""


@dataclass(slots=True)
class _Stream:
    line: int = 1
    pending: bytearray = field(default_factory=bytearray)
    overlong: bool = False


class LogReader:
    """Reads the engine's output in pieces of any size; several threads may feed it, each its own stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._findings: dict[tuple[tuple[str, str, str], ...], _Finding] = {}
        self._errors: dict[str, None] = {}

    def feed(self, stream: str, data: bytes) -> None:
        """Read more bytes of `stream` ("stdout", "stderr"). Lines end at a newline or a carriage return."""
        with self._lock:
            state = self._streams.setdefault(stream, _Stream())
            start = 0
            while start < len(data):
                ends = [at for at in (data.find(b"\n", start), data.find(b"\r", start)) if at >= 0]
                end = min(ends, default=len(data))
                self._append(state, data[start:end])
                if end < len(data):
                    self._finish(stream, state)
                    state.line += data[end] == 0x0A
                start = end + 1

    def close(self, stream: str) -> None:
        """The stream has ended: read what stands after its last newline."""
        with self._lock:
            if stream in self._streams:
                self._finish(stream, self._streams[stream])

    def claims(self, version: str | None = None) -> tuple[Claim, ...]:
        """What the lines so far say, in the order they were printed.

        `version` decides between templates that share a text; without it the version the log names is used.
        """
        with self._lock:
            findings = sorted(self._findings.values(), key=lambda f: (f.stream, f.line))
        named = version or next((value for value in _values(findings, "engine_version")), None)
        read = tuple(_claim(finding, named) for finding in findings)
        return read + _tokens_from_blocks(read)

    def last_errors(self) -> tuple[str, ...]:
        """The last few errors the engine printed, for "the engine failed to start"; a known one last, with its way out."""
        with self._lock:
            seen = list(self._errors)
        causes = [text for text in seen if not _POINTERS.search(text)]
        shown = (causes or seen)[-_SHOWN_ERRORS:]
        known = next((f"{text} [{failure}]" for text in causes if (failure := known_failure(text))), None)
        return tuple(shown) if known is None else (*shown[1 - _SHOWN_ERRORS :], known)

    def cause_of_death(self) -> str:
        """The first line that says which of the engine's processes died, or ""; "" too where the cause itself is known."""
        with self._lock:
            if any(known_failure(text) for text in self._errors):
                return ""
            return next((text for text in self._errors if _DEATHS.search(text)), "")

    def _append(self, state: _Stream, piece: bytes) -> None:
        room = MAX_LINE - len(state.pending)
        state.pending += piece[: max(room, 0)]

    def _finish(self, stream: str, state: _Stream) -> None:
        raw = bytes(state.pending)
        state.pending.clear()
        if raw and interesting(raw):
            for message in messages(raw):
                self._read(message, stream, state.line)

    def _read(self, message: Message, stream: str, line: int) -> None:
        if message.file in request_log_files():
            return
        if message.error:
            self._errors.pop(message.error, None)
            self._errors[message.error] = None
            if len(self._errors) > _MAX_ERRORS:
                del self._errors[next(iter(self._errors))]
        for candidates in _matches(message.text):
            key = tuple((template.pattern.pattern, value, layer) for template, value, layer in candidates)
            if key not in self._findings and len(self._findings) < _MAX_FINDINGS:
                self._findings[key] = _Finding(line, stream, message.process, candidates)


def read_log(text: bytes, stream: str = "file") -> LogReader:
    """A reader that has read a whole log file."""
    reader = LogReader()
    reader.feed(stream, text)
    reader.close(stream)
    return reader


def _matches(text: str) -> Iterator[tuple[tuple[LogLine, str, str], ...]]:
    by_field: dict[str, list[tuple[LogLine, str, str]]] = {}
    for template in log_lines():
        if template.literal in text and (match := template.pattern.match(text)):
            groups = match.groupdict()
            key = f"{template.stage} {template.field}"
            by_field.setdefault(key, []).append((template, groups.get("value") or "", groups.get("layer") or ""))
    for found in by_field.values():
        yield tuple(found)


def _values(findings: list[_Finding], name: str) -> Iterator[str]:
    for finding in findings:
        template, value, _ = finding.candidates[0]
        if template.field == name:
            yield value


def _claim(finding: _Finding, version: str | None) -> Claim:
    fitting = [c for c in finding.candidates if version is None or c[0].belongs_to(version)]
    template, value, layer = (fitting or list(finding.candidates))[0]
    name, note = template.field, template.note
    if not fitting:
        note = f"{note}; not a line that {version} is known to print".removeprefix("; ")
    # SpeculativeConfig builds a second CacheConfig in the engine's own processes (0.26.0+ config/speculative.py).
    inside = finding.process.startswith(("EngineCore", "Worker", "VllmWorker"))
    if name == "kv_cache_dtype" and template.literal == "data type to store kv cache" and inside and version:
        name = "draft_kv_cache_dtype" if in_range(version, _MLA_DRAFT_VERSIONS) else name
    read = _value(template, value, layer)
    if template.kind == "dtype" and read in ("auto", "None"):
        read, note = None, f"auto: no information; {note}".removesuffix("; ")
    process = f", {finding.process}" if finding.process else ""
    return Claim(
        stage=Stage(template.stage),
        source=Source.LOG,
        field=name,
        value=read,
        where=f"engine log line {finding.line} ({finding.stream}{process})",
        note=note,
    )


def _value(template: LogLine, value: str, layer: str) -> Json:
    text = value if template.constant is None else template.constant
    match template.kind:
        case "dtype":
            return canonical_dtype(str(text).removeprefix("torch.").replace("float8_e4m3fn", "fp8_e4m3"))
        case "layer":
            return {"layer": layer, "kv_cache_dtype": canonical_dtype(str(text))}
        case "int":
            return int(str(text).replace(",", ""))
        case "gib":
            return _gib(str(text))
        case "flag":
            return text if isinstance(text, bool) else text == "True"
        case _:
            return str(text).removeprefix("AttentionBackendEnum.")


def _gib(text: str) -> int | None:
    try:
        return int(float(text.replace(",", "")) * _GIB)
    except (ValueError, OverflowError):
        return None


def _tokens_from_blocks(claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Releases up to 0.11.0 may print blocks only; their block size is 16 unless a line says otherwise."""
    by_name = {claim.field: claim for claim in claims}
    blocks = by_name.get("kv_blocks")
    if blocks is None or "kv_tokens" in by_name:
        return ()
    size = by_name.get("block_size")
    tokens = blocks.value * (size.value if size else _OLD_BLOCK_SIZE)
    note = f"blocks × block size {size.value}" if size else "blocks × block size 16, the default of these releases"
    return (blocks.model_copy(update={"field": "kv_tokens", "value": tokens, "note": note}),)
