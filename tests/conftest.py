"""Settings of every test. Being here also puts this folder on the import path, for the helpers beside it."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shared machine pauses now and then. A deadline for each example would only make tests flicker, and so would the check that
# ends a test whose first examples took half a minute to draw.
settings.register_profile("kvguard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvguard")

_TESTS = Path(__file__).parent
_ENGINE = _TESTS / "engine"
_PROCESSES = tuple(_TESTS / folder for folder in ("engine", "guard", "deploy", "proxy", "cli", "compare"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on real engines first: they take longest, and the two workers then end together.

    A shared machine can stand still for half a minute, which no limit inside an engine or a kernel outlasts. Tests of
    running processes are therefore tried once more, and the summary lists each that needed it: read that list.
    """
    items.sort(key=lambda item: _ENGINE not in item.path.parents)
    for item in items:
        if any(folder in item.path.parents for folder in _PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))
