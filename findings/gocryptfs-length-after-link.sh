#!/bin/sh
# Behaviour: after link(2) on a mount of gocryptfs, stat() of both names tells the length of the encrypted file, which is
#   larger, until the kernel forgets what it was told, a second later. Reads of the file are right, and end where the
#   file does. Who compares lengths right after a link takes the file for another one.
# Seen: (length of a file of 300,000 bytes by stat)
#   before the link: 300000
#   right after it: 302386, and 300000 bytes can be read
#   two seconds later: 300000
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, /dev/fuse, fusermount.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="gocryptfs=2.3-1+b4"
place=$(mktemp -d)
trap 'umount "$place/mount" || true; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q "$DEBIAN" > apt.log 2>&1 && dpkg -x ./*.deb . || { cat apt.log; exit 77; }
test -c /dev/fuse || exit 77
mkdir below mount && echo password > password
usr/bin/gocryptfs -q -init -passfile password below
usr/bin/gocryptfs -q -passfile password below mount || exit 77
usr/bin/gocryptfs --version
cat > case.py <<'EOF'
import os
import sys
import time

with open("mount/file", "wb") as file:
    file.write(os.urandom(300_000))
before = os.stat("mount/file").st_size
os.link("mount/file", "mount/name")
after, known = os.stat("mount/name").st_size, os.stat("mount/file").st_size
with open("mount/name", "rb") as file:
    read = len(file.read())
time.sleep(2)
later = os.stat("mount/name").st_size
print(f"before the link: {before}")
print(f"right after it: {after}, of the first name {known}, and {read} bytes can be read")
print(f"two seconds later: {later}")
sys.exit(0 if before == later == read == 300_000 and after == known == 302_386 else 1)
EOF
"${PYTHON:-python3}" case.py
