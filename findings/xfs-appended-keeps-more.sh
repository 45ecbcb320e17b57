#!/bin/sh
# Behaviour: XFS allocates ahead when a file grows, as much again as the file has or more, and gives that back when the
#   file is closed. But where fallocate() was called for the file, it keeps it for good: a file of which all but the last
#   bytes were reserved takes two or three times its length. ftruncate() to the length that the file has gives it back.
# Seen: (space that a file of 256 MiB and 4 KiB takes, after fsync, close and sync; its last 4 KiB are appended)
#   written: 256 MiB
#   reserved, written: 768 MiB
#   reserved, written, truncated to its own length: 256 MiB
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, loop devices, XFS in the kernel.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="xfsprogs=6.1.0-1"
place=$(mktemp -d)
trap 'umount "$place/mount" || true; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q "$DEBIAN" > apt.log 2>&1 && dpkg -x ./*.deb . || { cat apt.log; exit 77; }
echo "Linux $(uname -r), $(sbin/mkfs.xfs -V)"
truncate -s 4G image && sbin/mkfs.xfs -q image > mkfs.log && mkdir mount
mount -t xfs -o loop image mount || exit 77
cat > case.py <<'EOF'
import os
import sys

MIB, COUNT = 1 << 20, 256


def make(name, reserve=True, cut=False):
    """Write a file, then append to it; returns the MiB that it takes."""
    file = os.open(f"mount/{name}", os.O_CREAT | os.O_RDWR)
    if reserve:
        os.posix_fallocate(file, 0, COUNT * MIB)
    for number in range(COUNT):
        os.pwrite(file, os.urandom(MIB), number * MIB)
    os.pwrite(file, os.urandom(4096), COUNT * MIB)
    os.fsync(file)
    if cut:
        os.ftruncate(file, COUNT * MIB + 4096)
    os.close(file)
    os.sync()
    return os.stat(f"mount/{name}").st_blocks * 512 // MIB


plain = make("plain", reserve=False)
print(f"written: {plain} MiB")
kept = make("kept")
print(f"reserved, written: {kept} MiB")
cut = make("cut", cut=True)
print(f"reserved, written, truncated to its own length: {cut} MiB")
sys.exit(0 if plain == cut == COUNT and kept > 1.5 * COUNT else 1)
EOF
"${PYTHON:-python3}" case.py
