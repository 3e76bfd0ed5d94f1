"""The image's health check: whether kvguard's management port answers. Exits 0 or 1."""

import os
import sys
import urllib.request

URL = os.environ.get("KVGUARD_HEALTH_URL", "http://127.0.0.1:9464/livez")

try:
    with urllib.request.urlopen(URL, timeout=5) as answer:  # noqa: S310 - the operator's own URL
        sys.exit(int(answer.status != 200))
except OSError as error:
    sys.stderr.write(f"{URL}: {error}\n")
    sys.exit(1)
