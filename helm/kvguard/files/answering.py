import sys
import urllib.error
import urllib.request

url = sys.argv[1]
try:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 (the chart gives the URL)
        confidence = answer.headers.get("x-kvguard-confidence")
        dtype = answer.headers.get("x-kvguard-kv-cache-dtype")
except urllib.error.HTTPError as error:
    sys.exit(f"{url}: {error.code}: {error.read(2000).decode('utf-8', 'replace')}")
except OSError as error:
    sys.exit(f"{url}: {error}")
if confidence is None:
    sys.exit(f"{url}: answered without kvguard in front")
if confidence == "unknown":
    sys.exit(f"{url}: kvguard answers, and nothing is known of the KV cache")
print(f"{url}: KV cache {dtype}, {confidence}")
