import sys

from huggingface_hub import snapshot_download

name, revision = [*sys.argv[1:], None][:2]
print(snapshot_download(name, revision=revision, ignore_patterns=["*.pth", "original/*", "consolidated*"]))
