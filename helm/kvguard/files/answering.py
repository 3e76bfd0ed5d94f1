import sys
import time
import urllib.error
import urllib.request

url, seconds = sys.argv[1], float(sys.argv[2])
end = time.monotonic() + seconds
while True:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 (the chart gives the URL)
            confidence = answer.headers.get("x-kvguard-confidence")
            dtype = answer.headers.get("x-kvguard-kv-cache-dtype")
        break
    except urllib.error.HTTPError as error:
        said = f"{url}: {error.code}: {error.read(2000).decode('utf-8', 'replace')}"
    except OSError as error:
        said = f"{url}: {error}"
    if time.monotonic() > end:
        sys.exit(f"{said} (asked for {seconds:g} s; no pod is ready)")
    time.sleep(min(5.0, seconds / 100))
if confidence is None:
    sys.exit(f"{url}: answered without kvguard in front")
if confidence == "unknown":
    sys.exit(f"{url}: kvguard answers, and nothing is known of the KV cache")
print(f"{url}: KV cache {dtype}, {confidence}")
