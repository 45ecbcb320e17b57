#!/bin/sh
# Behaviour: the writer of obstore's open_writer() keeps the memory that write() is given, and reads it when a part is
#   full or the writer is closed. Memory that is used again after write(), as a bytearray, changes the object. A file of
#   Python has its bytes when write() returns.
# Seen: (one buffer, written twice with other bytes in it)
#   file: aaaabbbb
#   MemoryStore: bbbbbbbb
#   LocalStore: bbbbbbbb
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="obstore==0.12.1"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import sys
from importlib.metadata import version

import obstore
from obstore.store import LocalStore, MemoryStore

print("obstore", version("obstore"))


def write(file):
    buffer = bytearray(4)
    with file:
        for letter in (b"a", b"b"):
            buffer[:] = letter * 4
            file.write(buffer)


write(open("file", "wb"))
seen = [open("file", "rb").read()]
print(f"file: {seen[0].decode()}")
for store in (MemoryStore(), LocalStore("files", mkdir=True)):
    write(obstore.open_writer(store, "a"))
    seen.append(bytes(obstore.get(store, "a").bytes()))
    print(f"{type(store).__name__}: {seen[-1].decode()}")
sys.exit(0 if seen == [b"aaaabbbb", b"bbbbbbbb", b"bbbbbbbb"] else 1)
EOF
venv/bin/python case.py
