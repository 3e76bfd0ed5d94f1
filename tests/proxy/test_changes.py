"""Requests that can change the engine, as the observer tells them."""

from __future__ import annotations

from typing import Any

import pytest

from kvguard.facts.changing_requests import changing_request, changing_requests
from kvguard.proxy.changes import ChangeObserver
from kvguard.proxy.paths import route_label


class Inner:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def request_started(self, route: str) -> None:
        self.calls.append(("started", route))

    def first_byte(self, route: str, seconds: float) -> None:
        self.calls.append(("byte", route, seconds))

    def finished(self, route: str, method: str, status: int, seconds: float, outcome: str) -> None:
        self.calls.append(("finished", route, method, status, seconds, outcome))


def one_request(observer: ChangeObserver, route: str) -> None:
    observer.request_started(route)
    observer.first_byte(route, 0.1)
    observer.finished(route, "POST", 500, 0.2, "upstream_error")


def test_it_counts_on_and_tells_of_changes_even_failed_ones() -> None:
    inner, told = Inner(), []
    observer = ChangeObserver(inner)
    one_request(observer, "/wake_up")  # nobody listens yet
    observer.changes = lambda path, *, answered: told.append((path, answered))
    for route in ("/wake_up", "/v1/completions", "other"):
        one_request(observer, route)
    assert told == [("/wake_up", False), ("/wake_up", True)]
    assert [call[0] for call in inner.calls] == ["started", "byte", "finished"] * 4


@pytest.mark.parametrize("request_", changing_requests(), ids=lambda one: one.path)
def test_they_are_known_behind_any_root_path(request_: Any) -> None:
    for path in (request_.path, f"/v1{request_.path}", f"/team/a{request_.path}/"):
        assert changing_request(path) == request_
        assert route_label(path) == request_.path
    assert route_label(f"{request_.path}/more") == "other"


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/", "", "/is_sleeping", "/asleep"])
def test_others_change_nothing(path: str) -> None:
    assert changing_request(path) is None
