#!/bin/sh
# Behaviour: on Btrfs, ranges that are cloned into a file free nothing of the space that fallocate() reserved for it, as
#   long as one page of the reserved extent is used. So a file that is reserved as a whole, gets all but some pages by
#   FICLONERANGE and the rest by writing, takes its full size beside the file that it shares them with. The same calls
#   without fallocate(), or with it for the gaps alone, take only what is written.
# Seen: (space of the file system that a file of 100 MiB takes, all but 100 of its pages cloned from another one)
#   reserved, cloned, written: 100 MiB
#   cloned, written: 0 MiB
#   cloned, gaps reserved, written: 0 MiB
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, loop devices, Btrfs in the kernel.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="btrfs-progs=6.2-1+deb12u2"
place=$(mktemp -d)
trap 'umount "$place/mount" || true; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q "$DEBIAN" > apt.log 2>&1 && dpkg -x ./*.deb . || { cat apt.log; exit 77; }
echo "Linux $(uname -r), $(sbin/mkfs.btrfs --version)"
truncate -s 500M image && sbin/mkfs.btrfs -q image > mkfs.log && mkdir mount
mount -t btrfs -o loop image mount || exit 77
cat > case.py <<'EOF'
import fcntl
import os
import struct
import sys

MIB, PAGE, COUNT = 1 << 20, 4096, 100
FICLONERANGE = 0x4020940D


def used():
    os.sync()
    stats = os.statvfs("mount")
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize / MIB


def make(name, whole=False, gaps=False):
    """Make a file of which the last page of each MiB is new; returns the MiB that it takes."""
    before = used()
    file = os.open(f"mount/{name}", os.O_CREAT | os.O_RDWR)
    if whole:
        os.posix_fallocate(file, 0, COUNT * MIB)
    for start in range(0, COUNT * MIB, MIB):
        fcntl.ioctl(file, FICLONERANGE, struct.pack("<qQQQ", base, start, MIB - PAGE, start))
    for end in range(MIB, COUNT * MIB + 1, MIB):
        if gaps:
            os.posix_fallocate(file, end - PAGE, PAGE)
        os.pwrite(file, os.urandom(PAGE), end - PAGE)
    os.fsync(file)
    os.close(file)
    return round(used() - before)


base = os.open("mount/base", os.O_CREAT | os.O_RDWR)
for number in range(COUNT):
    os.pwrite(base, os.urandom(MIB), number * MIB)
os.fsync(base)
reserved = make("reserved", whole=True)
print(f"reserved, cloned, written: {reserved} MiB")
plain = make("plain")
print(f"cloned, written: {plain} MiB")
gaps = make("gaps", gaps=True)
print(f"cloned, gaps reserved, written: {gaps} MiB")
sys.exit(0 if reserved >= COUNT - 1 and max(plain, gaps) <= 2 else 1)
EOF
"${PYTHON:-python3}" case.py
