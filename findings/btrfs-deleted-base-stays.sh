#!/bin/sh
# Behaviour: Btrfs frees an extent only when no file refers to any page of it. So where files share pages with an older
#   one (by FICLONERANGE, cp --reflink), deleting the older one frees almost nothing, though nearly all of its pages are
#   no longer in any file; du and the remaining file's length show nothing of it. XFS frees these pages.
# Seen: (space taken by 100 pages of a file of 100 MiB, cloned into another file, after the first one is deleted)
#   xfs: 0 MiB
#   btrfs: 100 MiB
#   btrfs, once the pages are copied to a new file and the clone is deleted: 0 MiB
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, loop devices, XFS and Btrfs.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="btrfs-progs=6.2-1+deb12u2 xfsprogs=6.1.0-1"
place=$(mktemp -d)
trap 'umount "$place/xfs" "$place/btrfs" || true; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q $DEBIAN > apt.log 2>&1 && for deb in *.deb; do dpkg -x "$deb" .; done || { cat apt.log; exit 77; }
echo "Linux $(uname -r), $(sbin/mkfs.btrfs --version), $(sbin/mkfs.xfs -V)"
for kind in xfs btrfs; do
    mkdir "$kind" && truncate -s 500M "$kind.image" && "sbin/mkfs.$kind" -q "$kind.image" > mkfs.log
    mount -t "$kind" -o loop "$kind.image" "$kind" || exit 77
done
cat > case.py <<'EOF'
import fcntl
import os
import struct
import subprocess
import sys

MIB, PAGE, COUNT = 1 << 20, 4096, 100
FICLONERANGE = 0x4020940D


def used(kind):
    """The MiB in use, after what is deleted in the background is done: at the latest when it is mounted again."""
    subprocess.run(["umount", kind], check=True)
    subprocess.run(["mount", "-t", kind, "-o", "loop", f"{kind}.image", kind], check=True)
    stats = os.statvfs(kind)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize / MIB


def kept(kind):
    """Clone one page of each MiB, and delete the file that they are from; returns the MiB that are left."""
    before = used(kind)
    base = os.open(f"{kind}/base", os.O_CREAT | os.O_RDWR)
    for number in range(COUNT):
        os.pwrite(base, os.urandom(MIB), number * MIB)
    os.fsync(base)
    clone = os.open(f"{kind}/clone", os.O_CREAT | os.O_RDWR)
    for number in range(COUNT):
        fcntl.ioctl(clone, FICLONERANGE, struct.pack("<qQQQ", base, number * MIB, PAGE, number * PAGE))
    os.fsync(clone)
    os.close(base)
    os.close(clone)
    os.unlink(f"{kind}/base")
    return before, round(used(kind) - before)


_, xfs = kept("xfs")
print(f"xfs: {xfs} MiB")
before, btrfs = kept("btrfs")
print(f"btrfs: {btrfs} MiB")
subprocess.run(["cp", "--reflink=never", "btrfs/clone", "btrfs/copy"], check=True)
os.unlink("btrfs/clone")
copied = round(used("btrfs") - before)
print(f"btrfs, once the pages are copied to a new file and the clone is deleted: {copied} MiB")
sys.exit(0 if max(xfs, copied) <= 2 and btrfs >= COUNT - 1 else 1)
EOF
"${PYTHON:-python3}" case.py
