#!/bin/sh
# Behaviour: obstore's rename() of an object in a MemoryStore to its own name deletes it, without an error: it is copied
#   onto itself, and then the old name is deleted. In a LocalStore the object stays. So a step "rename to the final
#   name" that is repeated after an interruption must look first whether the two names are one.
# Seen:
#   MemoryStore: before ['a'], after []
#   LocalStore: before ['a'], after ['a']
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


def names(store):
    return [entry["path"] for page in obstore.list(store) for entry in page]


seen = []
for store in (MemoryStore(), LocalStore("files", mkdir=True)):
    obstore.put(store, "a", b"data")
    before = names(store)
    obstore.rename(store, "a", "a")
    seen.append((before, names(store)))
    print(f"{type(store).__name__}: before {before}, after {seen[-1][1]}")
sys.exit(0 if seen == [(["a"], []), (["a"], ["a"])] else 1)
EOF
venv/bin/python case.py
