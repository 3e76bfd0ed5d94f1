"""The wrapped command is read as vLLM's own parser would read it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.engine.command import Command, parse_command, requested_claims, split_words
from kvguard.facts.cli_flags import table_for
from kvguard.vocabulary import Source, UsageError

VERSION = "0.32.0"


def parse(*argv: str, files: dict[str, bytes] | None = None, version: str = VERSION) -> Command:
    def read(path: str) -> bytes:
        if files is None or path not in files:
            raise UsageError(f"{path}: no such file")
        return files[path]

    return parse_command(split_words(argv), version, read)


@pytest.mark.parametrize(
    "argv",
    [
        ("--kv-cache-dtype", "fp8"),
        ("--kv_cache_dtype", "fp8"),
        ("--kv-cache-dtype=fp8",),
        ("--kv_cache_dtype=fp8",),
        ("--kv-cache-dtype", "auto", "--kv-cache-dtype", "fp8"),
    ],
)
def test_spellings_of_one_flag(argv: tuple[str, ...]) -> None:
    assert parse("vllm", "serve", "m", *argv).value("--kv-cache-dtype") == "fp8"


def test_the_model_is_found_among_flags() -> None:
    command = parse("vllm", "serve", "--enforce-eager", "--max-model-len", "2048", "models/a", "--port", "9")
    assert (command.model, command.value("--port")) == ("models/a", "9")
    assert parse("vllm", "serve", "--model", "b").model == "b"
    assert parse("python3", "-u", "-m", "vllm.entrypoints.openai.api_server", "--model", "c").model == "c"


def test_list_flags_take_everything_up_to_the_next_flag() -> None:
    command = parse("vllm", "serve", "m", "--served-model-name", "a", "b", "--api-key", "k1", "k2", "-tp", "2")
    assert command.values("--served-model-name") == ("a", "b")
    assert command.values("--api-key") == ("k1", "k2")
    assert command.value("--tensor-parallel-size") == "2"


def test_unique_prefixes_short_aliases_and_dotted_flags() -> None:
    command = parse("vllm", "serve", "m", "--worker-ext", "a.B", "-q", "fp8", "-cc.mode", "3", "--hf-overrides.a.b", "1", "-O3")
    assert command.value("--worker-extension-cls") == "a.B"
    assert command.value("--quantization") == "fp8"
    assert [use.name for use in command.uses[2:]] == [
        "--compilation-config.mode",
        "--hf-overrides.a.b",
        "--optimization-level",
    ]


def test_negated_flags_switch_off() -> None:
    command = parse("vllm", "serve", "m", "--enable-sleep-mode", "--no-enable-sleep-mode")
    assert not command.present("--enable-sleep-mode")


def test_yaml_is_below_the_command_line() -> None:
    files = {"c.yaml": b"kv_cache_dtype: fp8\nport: 9000\nenforce-eager: true\nserved-model-name: [a, b]\nmodel: m2\n"}
    command = parse("vllm", "serve", "--config", "c.yaml", "--port", "9001", files=files)
    assert command.model == "m2"
    assert command.value("--port") == "9001"
    use = command.last("--kv-cache-dtype")
    assert use is not None
    assert (use.values, use.source, use.where) == (("fp8",), Source.CONFIG_YAML, "c.yaml: kv_cache_dtype")
    assert command.present("--enforce-eager")
    assert command.values("--served-model-name") == ("a", "b")


def test_config_with_equals_is_not_read_and_warned_about() -> None:
    command = parse("vllm", "serve", "m", "--config=c.yaml")
    assert command.value("--kv-cache-dtype") is None
    assert any("--config=FILE" in warning for warning in command.warnings)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--kv-cache", "fp8"), "ambiguous"),
        (("--kv-cache-dtpye", "fp8"), "did you mean --kv-cache-dtype?"),
        (("--calculate-kv-scales",), "removed in 0.28.0; instead"),
        (("--port",), "expects a value"),
        (("other",), "one model"),
        (("--config", "none.yaml"), "none.yaml"),
        (("--config", "bad.yaml"), "bad.yaml line 2"),
        (("--config", "list.yaml"), "mapping"),
        (("--config", "a.yaml", "--config", "b.yaml"), "a second --config"),
        (("--config", "vllm.conf"), "named .yaml or .yml only"),
        (("--config", "big.yaml"), "more than 1 MiB"),
        (("--config", "deep.yaml"), "not valid YAML"),
        (("--config", "bin.yaml"), "not valid YAML"),
    ],
)
def test_what_vllm_would_reject_is_a_usage_error(argv: tuple[str, ...], says: str) -> None:
    files = {
        "bad.yaml": b"a: 1\n b: [\n",
        "list.yaml": b"- a\n",
        "bin.yaml": b"\x00\x01",
        "a.yaml": b"{}",
        "b.yaml": b"{}",
        "big.yaml": b"#" * (1 << 20) + b"\n",
        "deep.yaml": b"a: " + b"[" * 1500,
    }
    with pytest.raises(UsageError) as caught:
        parse("vllm", "serve", "m", *argv, files=files)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("argv", [(), ("bash", "-c", "vllm serve m"), ("python", "serve.py"), ("numactl", "vllm")])
def test_a_command_that_is_not_vllm_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="vllm serve"):
        split_words(argv)


def test_an_unread_version_passes_unknown_flags_and_says_so() -> None:
    command = parse("vllm", "serve", "m", "--brand-new", "x", "--kv-cache-dtype", "fp8", "--new-switch", version="0.99.0")
    assert command.value("--kv-cache-dtype") == "fp8"
    assert command.present("--new-switch")
    assert command.values("--brand-new") == ("x",)
    assert command.warnings
    assert not table_for("0.99.0").exact


def test_a_flag_that_came_and_went() -> None:
    assert parse("vllm", "serve", "--calculate-kv-scales", "m", version="0.27.1").present("--calculate-kv-scales")
    with pytest.raises(UsageError, match=r"removed in 0\.28\.0; instead, leave it out.*`kvguard calibrate MODEL`"):
        parse("vllm", "serve", "m", "--calculate_kv_scales", version="0.28.0")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), None),
        (("--hf-overrides", '{"a": 1}', "--hf-overrides", '{"b": 2}'), {"b": 2}),
        # Dotted uses stand after the plain one, and replace it.
        (("--hf-overrides.a.b", "1", "--hf-overrides", '{"c": 2}', "--hf_overrides.a.d=x"), {"a": {"b": 1, "d": "x"}}),
        (("--hf-overrides.a+", "x,y", "--hf-overrides.a+", "z"), {"a": ["x", "y", "z"]}),
        (("--hf-overrides.a", "[1]", "--hf-overrides.a", "[2]"), {"a": [1, 2]}),
        (("--hf-overrides.a", "1", "--hf-overrides.a.b", "null"), {"a": {"b": None}}),
    ],
)
def test_a_flag_that_holds_json(argv: tuple[str, ...], expected: dict[str, object] | None) -> None:
    assert parse("vllm", "serve", "m", *argv).json_object("--hf-overrides") == expected


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"a"', "[" * 100_000])
def test_a_flag_that_should_hold_json(text: str) -> None:
    with pytest.raises(UsageError, match=r"argument 2 .*--hf-overrides needs a JSON object"):
        parse("vllm", "serve", "m", f"--hf-overrides={text}").json_object("--hf-overrides")


def test_the_last_of_several_uses_counts() -> None:
    command = parse("vllm", "serve", "m", "--middleware", "a.B", "--middleware", "c.D", "--no-enable-prefix-caching")
    assert command.collected("--middleware") == ("a.B", "c.D")
    assert command.value("--middleware") == "c.D"
    assert not command.present("--enable-prefix-caching")
    assert (command.value("--enforce-eager"), command.values("--api-key")) == (None, ())


def test_requested_claims_name_where_each_value_was_written() -> None:
    claims = {c.field: c for c in requested_claims(parse("vllm", "serve", "m", "--kv-cache-dtype=fp8", "--dtype", "half"))}
    assert claims["kv_cache_dtype"].value == "fp8"
    assert "argument 2" in claims["kv_cache_dtype"].where
    assert claims["model_dtype"].value == "half"
    nothing = {c.field: c for c in requested_claims(parse("vllm", "serve", "m"))}
    assert nothing["kv_cache_dtype"].value is None


@given(st.lists(st.one_of(st.sampled_from(["--kv-cache-dtype", "fp8", "-tp", "--config", "=", "-", "--"]), st.text())))
def test_any_words_parse_or_are_refused(words: list[str]) -> None:
    with contextlib.suppress(UsageError):
        parse("vllm", "serve", *words, files={"fp8": b"a: [1"})


@given(st.binary(max_size=200))
def test_any_yaml_parses_or_is_refused(data: bytes) -> None:
    with contextlib.suppress(UsageError):
        parse("vllm", "serve", "m", "--config", "c.yml", files={"c.yml": data})
