import json

import pytest

from kvguard.facts import versions
from kvguard.facts.cli_flags import AmbiguousFlagError, flag_versions, has_flag, table_for
from kvguard.facts.echo import echoes, ready_message, stale_labels
from kvguard.facts.engines import all_engine_facts, engine_facts, summary_row
from kvguard.facts.log_lines import log_prefix
from kvguard.facts.metric_names import info_labels, series_names
from kvguard.facts.scale_names import recognised_forms
from kvguard.facts.versions import EXAMINED


def test_every_examined_version_has_every_kind_of_fact():
    for facts in all_engine_facts():
        assert facts.examined
        assert facts.dtypes
        assert facts.dtypes[0] == "auto"
        assert facts.dtypes_source.strip()
        assert facts.calculate_kv_scales in ("accepted", "deprecated", "removed")
        assert facts.series["kv_pinned_ratio"]
        assert "cache_dtype" in facts.info_labels
        assert facts.log_prefix is not None
        assert facts.log_fields["kv_cache_dtype"] >= 2
        assert {"typed"} <= {echo.cause for echo in facts.echo}
        for name, ruling in facts.auto.items():
            assert ruling.effect, name
            assert ruling.source, name


@pytest.mark.parametrize("version", ["0.33.0", "0.8.4", "0.20.3", "1.0", "nightly"])
def test_a_version_that_was_not_read_is_recognised_and_nothing_is_claimed(version):
    facts = engine_facts(version)
    assert facts.version == version
    assert not facts.examined
    assert "0.8.5..0.32.0" in facts.note
    assert facts.model_dump(exclude={"version", "examined", "guarded", "note"}, exclude_defaults=True) == {}
    assert set(summary_row(facts)) == {"version", "note"}


@pytest.mark.parametrize(
    ("version", "scheme", "fp8", "nvfp4"),
    [
        ("0.12.0", "the model's dtype", "the model's dtype", "the model's dtype"),
        ("0.14.1", "the model's dtype", "fp8_e4m3", "the model's dtype"),
        ("0.16.0", "fp8_e4m3, even over a typed value", "fp8_e4m3", "the model's dtype"),
        ("0.20.2", "fp8_e4m3, even over a typed value", "fp8_e4m3", "nvfp4, which does not start"),
        ("0.22.0", "fp8_e4m3", "fp8_e4m3", "nvfp4"),
    ],
)
def test_what_auto_becomes(version, scheme, fp8, nvfp4):
    row = summary_row(engine_facts(version))
    assert (row["compressed_tensors"], row["modelopt_fp8"], row["modelopt_nvfp4"]) == (scheme, fp8, nvfp4)


def test_flags_with_first_and_last_version():
    assert flag_versions("--kv-cache-dtype-skip-layers") == "0.19.0..0.32.0"
    assert has_flag("0.18.1", "--kv-cache-dtype-skip-layers") is False
    assert has_flag("0.19.0", "--kv-cache-dtype-skip-layers") is True
    assert has_flag("0.27.1", "--calculate-kv-scales") is True
    assert has_flag("0.28.0", "--calculate-kv-scales") is False
    # Only in the two parsers that were read in full.
    assert has_flag("0.32.0", "--grpc-port") is True
    assert has_flag("0.27.1", "--grpc-port") is False
    assert has_flag("0.20.2", "--grpc-port") is None
    assert has_flag("0.33.0", "--kv-cache-dtype") is None
    assert has_flag("0.20.2", "--never-heard-of") is None
    assert has_flag("0.32.0", "--never-heard-of") is False
    assert flag_versions("--never-heard-of") is None


def test_a_version_between_two_parsers_refuses_what_it_is_known_not_to_have():
    table = table_for("0.18.1")
    assert not table.exact
    assert table.version == "0.18.1"
    assert table.removed["--kv-cache-dtype-skip-layers"] == "new in 0.19.0"
    assert table.removed["--swap-space"] == "removed in 0.18.0"
    assert table.removed["--quantization-param-path"].startswith("removed before 0.8.5; instead")
    assert "--swap-space" in table_for("0.17.1").nargs
    assert "-sc" in table_for("0.19.0").short
    assert "-sc" not in table_for("0.18.1").short


@pytest.mark.parametrize("spelled", ["--kv-cache", "--kv-cache-dty", "--calculate-kv"])
def test_a_shortened_kv_flag_is_not_guessed_where_the_parser_was_not_read(spelled):
    with pytest.raises(AmbiguousFlagError):
        table_for("0.20.2").resolve(spelled)
    assert table_for("0.20.2").resolve("--kv-cache-dtype") == "--kv-cache-dtype"
    assert table_for("0.20.2").resolve("--api") is None


def test_a_parser_read_in_full_keeps_its_exact_flags():
    for version, count in (("0.27.1", 359), ("0.32.0", 406)):
        table = table_for(version)
        assert table.exact
        assert len(table.nargs) == count
        assert not table.removed.keys() & table.nargs.keys()
    assert table_for("0.27.1").removed["--grpc-port"] == "no such flag; it is known of 0.32.0"


def test_what_the_echo_is_worth():
    worth = {echo.cause: echo.true for echo in echoes("0.16.0")}
    assert worth["modelopt"]
    assert not worth["compressed_tensors"]
    assert not worth["compressed_tensors_over_typed"]
    assert "compressed_tensors_over_typed" not in {echo.cause for echo in echoes("0.22.0")}
    assert "compressed_tensors" not in {echo.cause for echo in echoes("0.14.1")}
    for version in EXAMINED[1:]:
        carried = ready_message(version)
        assert carried
        assert not any("kv" in item and "dtype" in item for item in carried)
    assert "block_size" in stale_labels("0.20.2")
    assert "block_size" not in stale_labels("0.23.0")


def test_metrics_by_version():
    assert series_names("kv_pinned_ratio", "0.8.5") == ("vllm:gpu_cache_usage_perc",)
    assert series_names("kv_pinned_ratio", "0.10.2") == ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert series_names("kv_pinned_ratio", "0.14.1") == ("vllm:kv_cache_usage_perc",)
    assert "calculate_kv_scales" in info_labels("0.27.1")
    assert "calculate_kv_scales" not in info_labels("0.28.0")
    assert "kv_cache_size_tokens" in info_labels("0.24.0")
    assert "kv_cache_size_tokens" not in info_labels("0.23.0")
    assert {"swap_space", "cpu_kvcache_space_bytes"} & set(info_labels("0.32.0")) == set()


def test_log_prefixes_and_scale_names_by_version():
    assert log_prefix("0.10.0").colour_when_piped
    assert not log_prefix("0.12.0").colour_when_piped
    assert "EngineCore_DP0" in log_prefix("0.14.1").engine
    assert recognised_forms("0.14.1")["output_scale"] == ("compressed-tensors", "fp8", "quark")
    assert recognised_forms("0.15.0")["output_scale"] == ("fp8", "quark")
    assert "cache" not in recognised_forms("0.19.1")
    assert "mixer" in recognised_forms("0.14.0")


def test_adding_a_version_is_adding_data(monkeypatch):
    """Ranges that reach the newest release end there: the next one is unknown until its data are written."""
    everything = json.dumps([facts.model_dump(mode="json") for facts in all_engine_facts()])
    assert "0.33" not in everything
    for entry in versions.read_data("kv_dtypes")["accepted"]:
        assert versions.in_range("0.33.0", entry["versions"]) is False
