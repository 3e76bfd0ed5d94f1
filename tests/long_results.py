"""What `make test-long` measured, kept as data with its date: tests/engine/long_results.json."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "engine/long_results.json"


def keep(topic: str, name: str, **figures: float) -> None:
    """Write these figures, in nats by token where nothing else is said, in place of those of an earlier run."""
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rounded = {key: round(value, 4) for key, value in figures.items()}
    document.setdefault(topic, {})[name] = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **rounded}
    RESULTS.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    print(topic, name, rounded)
