from __future__ import annotations

import contextlib
import copy
import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvguard.record.build import build_record
from kvguard.record.diff import diff_records
from kvguard.record.digest import content_digest
from kvguard.record.statement import STAGES, Statement
from kvguard.record.store import KEPT, default_directory, latest, load_statement, read_record, write_record
from kvguard.vocabulary import UsageError
from record_samples import sample

RECORD = build_record(sample())
NOW = "2025-11-29T15:03:00Z"


def edited(*path: str | int, value: Any) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    place: Any = record
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return record


def signed(record: dict[str, Any]) -> dict[str, Any]:
    record["predicate"]["content_digest"] = content_digest(record)
    return record


def read_or_one_line(path: Path) -> dict[str, Any] | None:
    try:
        return read_record(path)
    except UsageError as error:
        message = str(error)
    assert message.isprintable()
    return None


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_record(path)
    message = str(caught.value)
    assert message.startswith(f"record {path}: ")
    assert message.isprintable()
    return message


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "records"
    path = write_record(RECORD, directory, NOW)
    digest = RECORD["predicate"]["content_digest"]
    assert path.name == f"20251129T150300.000000Z-{digest[7:19]}.json"
    assert read_record(path) == RECORD
    assert load_statement(path).effective.scales == "checkpoint"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(directory) == [path.name]


def test_the_newest_fifty_stay_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("mine")
    for minute in range(KEPT + 5):
        write_record(RECORD, tmp_path, f"2025-11-29T15:{minute:02d}:00+00:00")
    names = sorted(os.listdir(tmp_path))
    assert len(names) == KEPT + 1
    assert names[0].startswith("20251129T150500")
    assert latest(tmp_path).name.startswith("20251129T155400")


def test_temporary_files_of_writers_that_died_are_swept(tmp_path: Path) -> None:
    noon = datetime(2025, 11, 29, 12, tzinfo=UTC).timestamp()
    ages = {".record-dead": 3601, ".record-at-work": 3599, ".recorded": 9000, "record-mine": 9000, ".record-directory": 9000}
    for name, age in ages.items():
        (tmp_path / name).mkdir() if name.endswith("directory") else (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (noon - age, noon - age))
    (tmp_path / ".record-link").symlink_to(tmp_path / "record-mine")
    os.utime(tmp_path / ".record-link", (noon - 9000, noon - 9000), follow_symlinks=False)
    path = write_record(RECORD, tmp_path, "2025-11-29T12:00:00Z")
    assert sorted(os.listdir(tmp_path)) == sorted([*(set(ages) - {".record-dead"}), path.name])


def test_a_clock_that_went_back_does_not_lose_the_record_just_written(tmp_path: Path) -> None:
    for minute in range(KEPT):
        write_record(RECORD, tmp_path, f"2025-11-29T15:{minute:02d}:00Z")
    assert write_record(RECORD, tmp_path, "2001-01-01T00:00:00Z").exists()
    assert len(os.listdir(tmp_path)) == KEPT


@pytest.mark.parametrize("now", ["2025-11-29T15:03:00", "2025-11-29T15:03:00+01:00", "yesterday"])
def test_only_utc_is_a_time(tmp_path: Path, now: str) -> None:
    with pytest.raises(ValueError, match=r"2025-11-29T15:03:00|yesterday"):
        write_record(RECORD, tmp_path, now)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"record directory .*file: cannot be written: "):
        write_record(RECORD, tmp_path / "file", NOW)
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        write_record(RECORD, tmp_path / "file" / "x", NOW)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvguard.record.store.os.fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_record(RECORD, tmp_path, NOW)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "changed",
    [
        edited("predicate", "verdict", value="refuse"),
        edited("predicate", "attributes", 4, "value", "dtype", value="bfloat16"),
        edited("predicate", "layers", 0, "k_scale", value=[1.0]),
        edited("subject", 0, "digest", "sha256", value="d" * 64),
        edited("predicate", "added", value=1),
        edited("predicate", "content_digest", value="sha256:" + "0" * 64),
    ],
)
def test_a_changed_record_is_found_out(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert "was changed after it was written" in refusal(tmp_path / "r.json", json.dumps(changed).encode())


def test_layout_and_undigested_members_may_change(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    changed = edited("predicate", "undigested", value={"note": "annotated later"})
    path.write_text(json.dumps(changed, indent=None, sort_keys=True))
    assert read_record(path) == changed


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (edited("_type", value="https://in-toto.io/Statement/v0.1"), "_type"),
        (edited("predicateType", value="https://slsa.dev/provenance/v1"), "predicateType"),
        (edited("subject", 0, "digest", "sha256", value="short"), "subject.0.digest.sha256"),
        (edited("predicate", "verdict", value="perhaps"), "predicate.verdict"),
        (edited("predicate", "attributes", value=[]), "attributes must be"),
        (edited("predicate", "attributes", 0, "value", value="text"), "requested: value: Input should be a valid"),
        (edited("predicate", "attributes", 4, "value", value=[]), "effective: value: Input should be"),
        (
            edited("predicate", "attributes", 5, "value", value=[{"name": "x"}]),
            "checks: value.0.result: Field required",
        ),
        (edited("predicate", "layers", value=[1]), "predicate.layers.0"),
    ],
)
def test_what_is_not_a_run_record_is_refused_by_member(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    message = refusal(tmp_path / "r.json", json.dumps(signed(changed)).encode())
    assert "not a run record" in message
    assert named in message


MEASURED: dict[str, Any] = RECORD["predicate"]["undigested"]["measured"]
DTYPE = {"stage": "observed", "source": "tensors", "field": "kv_cache_dtype", "value": "fp8_e5m2", "where": "rank 0"}


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        (None, "undigested.measured"),
        ({"effective": {"kv_bytes": "many"}}, "undigested.measured.effective.kv_bytes"),
        ({"observed": [DTYPE]}, "a claim about kv_cache_dtype is no size"),
        ({"supported_by": [{**DTYPE, "stage": "requested", "field": "kv_tokens"}]}, "no size"),
        ({"observed": [{"field": []}]}, "undigested.measured.observed.0"),
        ({"layers": [3]}, "undigested.measured.layers.0"),
    ],
)
def test_only_sizes_are_measured(tmp_path: Path, measured: Any, named: str) -> None:
    message = refusal(tmp_path / "r.json", json.dumps(edited("predicate", "undigested", "measured", value=measured)).encode())
    assert named in message


def test_measured_sizes_cannot_change_what_was_digested() -> None:
    measured = copy.deepcopy(MEASURED)
    measured["effective"] |= {"dtype": "bfloat16", "kv_bytes": 5}
    measured["layers"][0] |= {"k_scale": [1.0], "shape": [9]}
    for item in measured["observed"]:
        if item["source"] == "capacity":
            item["value"] = "16-bit"
    statement = Statement.model_validate(edited("predicate", "undigested", "measured", value=measured))
    assert (statement.effective.dtype, statement.effective.kv_bytes) == ("fp8_e4m3", 5)
    assert (statement.layers[0]["k_scale"], statement.layers[0]["shape"]) == ([0.05], [9])
    capacity = [item for item in statement.claims("observed") if item.source == "capacity"]
    assert [(item.value, item.where) for item in capacity] == [("8-bit", "capacity: … bytes ÷ … tokens")]


def test_a_record_without_measured_sizes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(edited("predicate", "undigested", value={})))
    statement = load_statement(path)
    assert statement.effective.kv_bytes is None
    assert len(statement.claims("observed")) == 3


TEXT = json.dumps(RECORD)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        TEXT[:-20].encode(),
        TEXT.replace('"kvguard_version"', '"verdict": "serve", "kvguard_version"').encode(),
        TEXT.replace("4242", "NaN").encode(),
        TEXT.replace('"kv_bytes": 1073741824', '"kv_bytes": 1, "x": 1e999').encode(),
        TEXT.replace("4242", "9" * 5000).encode(),
        TEXT.replace('"kvguard_version"', '"x": 1e999, "kvguard_version"').encode(),
        TEXT.replace('"kvguard_version"', '"x": "\\ud800", "kvguard_version"').encode(),
        TEXT.replace('"kvguard_version"', '"x": ' + "[" * 900 + "]" * 900 + ', "kvguard_version"').encode(),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_malformed_documents_are_one_line(tmp_path: Path, content: bytes) -> None:
    assert refusal(tmp_path / "r.json", content)


def test_only_small_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvguard.record.store.MAX_BYTES", 100)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "big").write_bytes(b" " * 101)
    for name, expected in {
        "fifo": "not a regular file",
        "big": "larger than 100 bytes",
        "none": "no such file",
    }.items():
        with pytest.raises(UsageError, match=expected):
            read_record(tmp_path / name)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.binary(max_size=6).map(lambda noise: TEXT[:900].encode() + noise + TEXT[900:].encode()))
def test_arbitrary_bytes_never_raise_anything_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    read_or_one_line(path)


PLACES = st.sampled_from(
    [("subject",), ("predicate",), *(("predicate", name) for name in RECORD["predicate"])]
    + [("predicate", "attributes", number, "value") for number in range(6)]
    + [("predicate", "undigested", "measured", name) for name in MEASURED]
    + [("predicate", "layers", 0), ("predicate", "plan", "argv"), ("predicate", "engine", "version")]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLACES, JUNK)
def test_arbitrary_members_never_raise_anything_else(tmp_path: Path, place: tuple[str | int, ...], junk: Any) -> None:
    record = edited(*place, value=junk)
    with contextlib.suppress(ValueError, TypeError):
        record = signed(record)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    read = read_or_one_line(path)
    if read is None:
        return
    assert content_digest(read) == read["predicate"]["content_digest"]
    statement = Statement.model_validate(read)
    assert statement.effective.dtype is not None
    assert [len(statement.claims(stage)) for stage in STAGES]
    assert diff_records(read, read) == ()


def test_latest_says_when_there_is_none(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="no record in"):
            latest(directory)


def test_default_directory_follows_xdg() -> None:
    assert default_directory({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/kvguard/records")
    assert default_directory({"XDG_STATE_HOME": "relative", "HOME": "/h"}) == Path("/h/.local/state/kvguard/records")
    assert default_directory({"HOME": "/h"}) == Path("/h/.local/state/kvguard/records")
