from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvguard.policy.models import (
    POLICY_DTYPES,
    DriftPolicy,
    OnDrift,
    OnRegression,
    OnViolation,
    Policy,
    ScalesRule,
)
from kvguard.policy.parse import MAX_BYTES, load_policy, parse_policy
from kvguard.vocabulary import Confidence, UsageError

FULL = b"""\
kv_cache:
  dtype: [fp8_e4m3, 16bit]
  scales: checkpoint
  skip_layers: [0, "29", sliding_window]
  min_confidence: proven
engine:
  version: ">=0.27,<0.34"
  attention_backend: FLASH_ATTN
shadow:
  on_regression: unready
drift:
  action: unready
  min_confidence: corroborated
on_violation: hold
"""


def errors(text: bytes) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse_policy(text, "policy.yaml")
    return str(caught.value).splitlines()


def test_every_key_is_read() -> None:
    policy = parse_policy(FULL, "policy.yaml")
    assert policy.kv_cache.dtype == ("fp8_e4m3", "16bit")
    assert policy.kv_cache.scales is ScalesRule.CHECKPOINT
    assert policy.kv_cache.skip_layers == ("0", "29", "sliding_window")
    assert policy.kv_cache.min_confidence is Confidence.PROVEN
    assert policy.engine.version == "<0.34,>=0.27"
    assert policy.engine.attention_backend == ("FLASH_ATTN",)
    assert policy.shadow.on_regression is OnRegression.UNREADY
    assert policy.drift == DriftPolicy(action=OnDrift.UNREADY, min_confidence=Confidence.CORROBORATED)
    assert policy.on_violation is OnViolation.HOLD
    assert policy.model_fields_set == set(Policy.model_fields)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"kv_cache:\n  # dtype: fp8\n",
        b"kv_cache: {dtype: [], skip_layers: []}\nengine: {version: ''}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_everything_may_be_left_out(text: bytes) -> None:
    assert parse_policy(text, "policy.yaml") == Policy()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            b"kv_cache:\n  dtype: fp8\n\n  scale: unit\n",
            "policy.yaml line 4: kv_cache.scale: unknown key; did you mean 'scales'?",
        ),
        (
            b"min-confidence: proven",
            "policy.yaml line 1: min-confidence: unknown key; allowed: kv_cache, engine, shadow, drift, on_violation",
        ),
        (
            b"kv_cache:\n  min-confidence: proven",
            "line 2: kv_cache.min-confidence: unknown key; did you mean 'min_confidence'?",
        ),
        (b"dtype: fp8", "policy.yaml line 1: dtype: unknown key; did you mean 'kv_cache.dtype'?"),
        (
            b"kv_cache:\n  scales: checkpont",
            "line 2: kv_cache.scales: 'checkpont' is not allowed; did you mean 'checkpoint'? allowed: runtime,",
        ),
        (
            b"kv_cache:\n  dtype:\n  - fp8\n  - BF16",
            "line 4: kv_cache.dtype[1]: 'BF16' is not allowed; did you mean 'bfloat16'?",
        ),
        (b"kv_cache:\n  dtype: auto", "line 2: kv_cache.dtype: 'auto' is not allowed; allowed: float32, bfloat16"),
        (b"kv_cache:\n  dtype: 8", "line 2: kv_cache.dtype: must be text, found a YAML number, 8; allowed:"),
        (b"kv_cache:\n  dtype: [fp8, yes]", "line 2: kv_cache.dtype[1]: must be text, found a YAML boolean, yes"),
        (b"kv_cache:\n  dtype: 2025-01-01", "found a YAML date"),
        (b"kv_cache:\n  dtype:\n  scales: any", "line 2: kv_cache.dtype: has no value; give one, or remove the key"),
        (b"kv_cache:\n  dtype: {a: b}", "line 2: kv_cache.dtype: must be a value or a list of values"),
        (b"kv_cache:\n  dtype: [[fp8]]", "line 2: kv_cache.dtype[0]: takes one value, found a list"),
        (b"shadow: {on_regression: die}", "line 1: shadow.on_regression: 'die' is not allowed; allowed: alert, unready"),
        (b"on_regression: alert", "line 1: on_regression: unknown key; did you mean 'shadow.on_regression'?"),
        (b"kv_cache: fp8", "line 1: kv_cache: must be a section with the keys dtype, scales"),
        (b"kv_cache: [dtype]", "line 1: kv_cache: must be a section"),
        (b"- a", "policy.yaml line 1: must be a section with the keys kv_cache, engine, shadow, drift, on_violation"),
        (b"fp8", "policy.yaml line 1: must be a section"),
        (b"kv_cache:\n  skip_layers: 0,1", "line 2: kv_cache.skip_layers: '0,1' is not a layer's index"),
        (b"kv_cache:\n  skip_layers: [-1]", "'-1' is not a layer's index"),
        (b"kv_cache:\n  skip_layers: [0x10]", "'0x10' is not a layer's index"),
        (b"kv_cache:\n  skip_layers: [on]", "found a YAML boolean"),
        (
            b"engine:\n  version: 0.32",
            "line 2: engine.version: must be text, found a YAML number, 0.32; write it in quotes",
        ),
        (b"engine:\n  version: '>=newest'", "line 2: engine.version: '>=newest' is not a version specifier"),
        (b"engine:\n  version: >=0.27\n", "write a version range in quotes"),
        (b"engine:\n  attention_backend: FLASH ATTN", "is not a backend's name"),
        (b"on_violation: [warn]", "line 1: on_violation: takes one value, found a list"),
        (b"on_violation: off", "found a YAML boolean, off; allowed: refuse, hold, warn"),
        (b"on_violation: warn\non_violation: refuse", "line 2: on_violation: stands twice, first on line 1; keep one"),
        (
            b"kv_cache:\n  dtype: 16bit\n  scales: unit",
            "line 3: kv_cache.scales: 'unit' can never hold with dtype 16bit",
        ),
        (b"? [a]\n: b", "a key must be one word"),
        (b"<<: {on_violation: warn}", "<<: unknown key"),
        (b"", "policy.yaml: policy is empty"),
        (b"# nothing yet\n", "policy.yaml: policy is empty"),
        (b"---\n...\n", "policy.yaml: policy is empty"),
        (b"on_violation: warn\n---\non_violation: warn\n", "line 2: a second document"),
        (b"kv_cache: &a {}\nengine: *a", "line 1: anchors and aliases"),
        (b"kv_cache:\n  dtype: *a", "line 2: anchors and aliases"),
        (b"kv_cache:\n  dtype: !!python/object/apply:os.system [id]", "line 2: tags (!) are not allowed"),
        (b"kv_cache:\n  dtype: !!str fp8", "line 2: tags (!) are not allowed"),
        (b"on_violation: warn\n\nengine: \xff", "policy.yaml line 3: not UTF-8 text"),
        (b"on_violation: warn\n# \x1b[2J", "policy.yaml line 2: control character U+001B"),
        ("# \u202e".encode(), "policy.yaml line 1: control character U+202E"),
        (b"a: b: c", "policy.yaml line 1: not YAML: mapping values are not allowed here"),
        (b"a: 'open", "not YAML: found unexpected end of stream"),
        (b'a: "\\U99999999"', "policy.yaml: not YAML:"),
        (b"[" * 100_000, "line 1: nested deeper than 8 levels"),
        (b"a:\n" + b"- b\n" * 100_000, "more than 5000 entries"),
        (b"# " + b"x" * MAX_BYTES, "policy.yaml: larger than 1,048,576 bytes"),
        (b"on_violation: " + b"x" * 10_000, "line 1: on_violation: 'xxx"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_each_error_names_line_key_and_cure(text: bytes, expected: str) -> None:
    found = errors(text)
    assert len(found) == 1
    assert expected in found[0]
    assert len(found[0]) < 500


def test_several_errors_are_told_at_once_in_the_files_order() -> None:
    text = b"kv_cache:\n  dtype: [fp9, 8, bf16]\n  scale: unit\nengine:\n  version: x\non_violation: stop\n"
    found = errors(text)
    assert [line.split(":")[0] for line in found] == [f"policy.yaml line {n}" for n in (2, 2, 2, 3, 5, 6)]
    assert "dtype[2]: 'bf16'" in "".join(found)


def test_a_flood_of_errors_is_cut() -> None:
    found = errors(b"".join(b"key%d: 1\n" % number for number in range(100)))
    assert len(found) == 21
    assert found[-1] == "policy.yaml: and 80 more errors"


def test_file_names_cannot_break_the_line() -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(b"", "a\nb\x1b.yaml")
    assert str(caught.value).startswith("a\ufffdb\ufffd.yaml: policy is empty")


def test_load_policy_reads_a_file_and_follows_links(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_bytes(FULL)
    (tmp_path / "policy.yaml").symlink_to("real.yaml")
    assert load_policy(tmp_path / "policy.yaml") == parse_policy(FULL, "x")


def test_load_policy_refuses_what_is_not_a_small_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "huge").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "loop").symlink_to("loop")
    cases = {
        "missing": "no such file",
        "fifo": "not a regular file",
        ".": "not a regular file",
        "huge": "larger than 1,048,576 bytes",
        "loop": "cannot be read",
        "n\0ul": "cannot be read",
    }
    for name, expected in cases.items():
        with pytest.raises(UsageError, match=expected) as caught:
            load_policy(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_load_policy_says_when_it_may_not_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(FULL)
    path.chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        load_policy(path)


def parses_or_says_why(text: bytes) -> Policy | None:
    try:
        return parse_policy(text, "policy.yaml")
    except UsageError as error:
        for line in str(error).splitlines():
            assert line.startswith("policy.yaml")
            assert line.isprintable()
            assert len(line) < 700
        return None


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise_anything_else(text: bytes) -> None:
    parses_or_says_why(text)


@given(st.text(alphabet="abkv_:-[]{}&*!%@`'\"|>?#,\\ \n\t0189.xU~=<\u2028\x85", max_size=120))
def test_arbitrary_yaml_punctuation_never_raises_anything_else(text: str) -> None:
    parses_or_says_why(text.encode())


WORDS = st.sampled_from(
    [
        "kv_cache",
        "engine",
        "on_violation",
        "dtype",
        "scales",
        "skip_layers",
        "version",
        "attention_backend",
        "min_confidence",
    ]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | st.sampled_from(POLICY_DTYPES)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | SCALARS, inner, max_size=4),
    max_leaves=20,
)


@given(TREES)
def test_arbitrary_structures_never_raise_anything_else(tree: object) -> None:
    parses_or_says_why(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))


POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "kv_cache": st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.lists(st.sampled_from(POLICY_DTYPES)) | st.sampled_from(POLICY_DTYPES),
                "skip_layers": st.lists(st.integers(0, 99) | st.just("sliding_window")) | st.integers(0, 99),
                "min_confidence": st.sampled_from(["proven", "corroborated", "echoed"]),
            },
        ),
        "engine": st.fixed_dictionaries(
            {},
            optional={
                "version": st.sampled_from(["", ">=0.27,<0.34", "==0.32.*", "~=0.30"]),
                "attention_backend": st.lists(st.from_regex(r"\A[A-Z][A-Z0-9_]{0,20}\Z")),
            },
        ),
        "on_violation": st.sampled_from(["refuse", "hold", "warn"]),
    },
)


@given(POLICIES, st.booleans())
def test_what_the_models_accept_the_parser_reads_the_same(data: dict[str, object], flow: bool) -> None:
    text = yaml.safe_dump(data, default_flow_style=flow).encode()
    assert parse_policy(text, "policy.yaml") == Policy.model_validate(data)


def test_numbers_and_yes_or_no_are_written_as_such() -> None:
    text = b"shadow:\n  baseline: 0.05\n  tolerance: 1\n  require_opt_in: true\n  measure_ranges: off\n"
    shadow = parse_policy(text, "p.yaml").shadow
    assert (shadow.baseline, shadow.tolerance, shadow.require_opt_in, shadow.measure_ranges) == (0.05, 1.0, True, False)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("baseline: .nan", "shadow.baseline: must be a decimal number, found .nan"),
        ("baseline: 190:20:30", "must be a decimal number, found 190:20:30"),
        ("baseline: 0x1f", "must be a decimal number, found 0x1f"),
        ("baseline: -1", "shadow.baseline"),
        ("baseline: 1e999", "shadow.baseline"),
        ("tolerance: 0", "shadow.tolerance"),
        ("tolerance: yes", "must be text, found a YAML boolean"),
        ("on_regression: 1", "must be text, found a YAML number"),
        ("require_opt_in: 2", "must be text, found a YAML number"),
    ],
)
def test_numbers_that_are_none(value: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(f"shadow:\n  {value}\n".encode(), "p.yaml")
    assert "p.yaml line 2" in str(caught.value)
    assert words in str(caught.value)


def test_the_policies_of_the_documents_are_policies() -> None:
    root = Path(__file__).parents[2]
    found = 0
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for block in page.read_text().split("```yaml\n")[1:]:
            text = block.partition("```")[0]
            if text.startswith(("kv_cache:", "shadow:", "drift:")):
                parse_policy(text.encode(), str(page))
                found += 1
    assert found >= 2
