import os
import sys
import time

path, seconds = sys.argv[1], float(sys.argv[2])
end = time.monotonic() + seconds
while not os.path.isdir(path):
    if time.monotonic() > end:
        sys.exit(f"{path}: not there after {seconds:g} s; look at the calibration Job")
    time.sleep(min(5.0, seconds / 100))
