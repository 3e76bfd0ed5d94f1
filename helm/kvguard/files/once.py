import fcntl
import os
import sys

path, *command = sys.argv[1:]
try:
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o660)
except OSError as error:
    sys.exit(f"{path}: this user cannot write there ({error.strerror}); look at the claim, and at runAsUser")
# Held by this process also when it has become the command, and let go by the kernel when that ends, however it ends.
os.set_inheritable(lock, True)
try:
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print(f"{path}: another one measures; waiting for it", flush=True)
    fcntl.lockf(lock, fcntl.LOCK_EX)
except OSError as error:
    print(f"{path}: this volume has no locks ({error.strerror}); several may measure, and the last one is kept", flush=True)
if os.path.isdir(path):
    print(f"{path}: there already; nothing is measured anew")
    sys.exit(0)
os.execvp(command[0], command)  # noqa: S606
