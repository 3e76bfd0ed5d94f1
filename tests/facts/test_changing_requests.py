"""The table of requests that can change an engine."""

from __future__ import annotations

import re

from kvguard.facts.changing_requests import changing_requests
from kvguard.facts.versions import in_range


def test_every_entry_can_be_looked_up() -> None:
    paths = [request.path for request in changing_requests()]
    assert len(paths) == len(set(paths))
    for request in changing_requests():
        assert re.fullmatch(r"(/[a-z_]+)+", request.path)
        assert re.search(r"\d+\.\d+\.\d+ entrypoints/\S+\.py:\d+", request.source)
        assert in_range("0.32.0", request.versions)


def test_what_the_watch_rests_on_is_in_it() -> None:
    """A path that is lost here is a change that nobody notices before the timer."""
    effects = {request.path: request.effect for request in changing_requests()}
    assert effects["/sleep"] == "asleep"
    assert {path for path, effect in effects.items() if effect == "changed"} >= {
        "/wake_up",
        "/update_weights",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/scale_elastic_ep",
        "/reset_prefix_cache",
    }
