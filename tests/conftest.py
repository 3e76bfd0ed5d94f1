"""Settings of every test. Being here also puts this folder on the import path, for the helpers beside it."""

from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine pauses now and then; a deadline for each example would only make tests flicker.
settings.register_profile("kvguard", deadline=None)
settings.load_profile("kvguard")

_ENGINE = Path(__file__).parent / "engine"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on real engines first: they take longest, and the two workers then end together."""
    items.sort(key=lambda item: _ENGINE not in item.path.parents)
