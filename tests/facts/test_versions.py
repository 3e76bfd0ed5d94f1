import pytest

from kvguard.facts import versions
from kvguard.facts.versions import EXAMINED, KNOWN, examined, in_range, join_ranges, parse


def test_the_examined_versions_are_ordered_and_span_the_known_range():
    parsed = [parse(text) for text in EXAMINED]
    assert parsed == sorted(parsed)
    assert f"{EXAMINED[0]}..{EXAMINED[-1]}" == KNOWN == "0.8.5..0.32.0"


@pytest.mark.parametrize(
    ("version", "text", "inside"),
    [
        ("0.14.0", "0.14.0..0.32.0", True),
        ("0.32.0", "0.14.0..0.32.0", True),
        ("0.32.0+cpu", "0.14.0..0.32.0", True),
        ("0.32.0rc1", "0.32.0", False),
        ("0.9.0.1", "0.9.0.1", True),
        ("0.10.0", "0.9.2..0.11.0", True),
        ("0.13.9", "0.14.0..0.32.0", False),
        ("0.17.0", "0.8.5..0.11.2,0.17.0..0.32.0", True),
        ("0.13.0", "0.8.5..0.11.2,0.17.0..0.32.0", False),
        ("nightly", "0.8.5..0.32.0", False),
        ("", "0.8.5..0.32.0", False),
    ],
)
def test_ranges(version, text, inside):
    assert in_range(version, text) is inside


@pytest.mark.parametrize("text", ["", "new", "0.1..new", ".."])
def test_a_malformed_range_is_a_mistake_of_ours(text):
    with pytest.raises(ValueError, match="version range"):
        in_range("0.32.0", text)


def test_only_releases_that_were_read_count_as_examined():
    assert examined("0.32.0+cpu")
    assert not examined("0.20.3")
    assert not examined("0.33.0")
    assert not examined("main")


def test_adjacent_ranges_join_and_gaps_stay():
    assert join_ranges(["0.20.0..0.24.0", "0.25.0..0.27.1"]) == "0.20.0..0.27.1"
    assert join_ranges(["0.11.0", "0.32.0"]) == "0.11.0, 0.32.0"


def test_every_range_and_source_in_the_facts_is_usable():
    def walk(value):
        if isinstance(value, dict):
            for key, below in value.items():
                if key in ("versions", "flag", "attention", "mla") and isinstance(below, str) and not below.startswith("--"):
                    in_range("0.32.0", below)
                if key == "source":
                    assert below.strip()
                walk(below)
        elif isinstance(value, list):
            for below in value:
                walk(below)

    for name in (
        "architectures",
        "cautions",
        "cli_flags",
        "devices",
        "echo",
        "failures",
        "kv_dtypes",
        "kv_resolution",
        "kv_scales",
        "log_lines",
        "metrics",
        "producers",
    ):
        walk(versions.read_data(name))
