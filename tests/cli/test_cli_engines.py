import json

import typer
from typer.testing import CliRunner

from kvguard.cli.engines import engines
from kvguard.facts.versions import EXAMINED

app = typer.Typer()
app.command()(engines)


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.exception
    return result.stdout


def test_the_table_has_one_line_for_each_examined_version():
    lines = run().splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(EXAMINED)]] == list(EXAMINED)
    at = next(line for line in lines if line.split()[:1] == ["0.16.0"])
    assert "even over a typed value" in at
    assert "everything about them is unknown" in lines[-1]


def test_one_version_in_full():
    text = run("0.28.0")
    for part in ("nvfp4_4over6", "--calculate-kv-scales:", "removed", "auto (decided by a compressed-tensors", "not what runs"):
        assert part in text


def test_an_unread_version_says_so():
    text = run("0.33.0")
    assert "not examined" in text
    assert "auto with" not in text


def test_json_has_every_fact_with_its_source():
    report = json.loads(run("--json"))
    assert report["known"] == "0.8.5..0.32.0"
    newest = report["engines"][-1]
    assert newest["version"] == "0.32.0"
    assert "ultraquant_4bit" in newest["dtypes"]
    assert all(ruling["source"] for ruling in newest["auto"].values())
    assert json.loads(run("0.33.0", "--json"))["engines"][0]["dtypes"] is None
