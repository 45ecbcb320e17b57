#!/bin/sh
# Behaviour: FICLONERANGE of one range is not all or nothing. Where the file system runs full meanwhile, the call fails
#   with ENOSPC, and a part of the range is in the file, whose length has grown. So after an error the file is not as it
#   was. (A clone needs space for its extents alone: here are 25,600 of one page each.)
# Seen: (one call for 100 MiB into an empty file on a full file system)
#   xfs: No space left on device, and the file has 76 MiB, equal to the source's first
#   btrfs: No space left on device, and the file has 21 MiB, equal to the source's first
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, loop devices, XFS and Btrfs.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="xfsprogs=6.1.0-1 btrfs-progs=6.2-1+deb12u2"
place=$(mktemp -d)
trap 'umount "$place/xfs" "$place/btrfs" || true; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q $DEBIAN > apt.log 2>&1 && for deb in *.deb; do dpkg -x "$deb" .; done || { cat apt.log; exit 77; }
echo "Linux $(uname -r), $(sbin/mkfs.xfs -V), $(sbin/mkfs.btrfs --version)"
for kind in xfs btrfs; do
    mkdir "$kind" && truncate -s 400M "$kind.image" && "sbin/mkfs.$kind" -q "$kind.image" > mkfs.log
    mount -t "$kind" -o loop "$kind.image" "$kind" || exit 77
done
cat > case.py <<'EOF'
import contextlib
import errno
import fcntl
import os
import struct
import sys

MIB, PAGE = 1 << 20, 4096
SIZE = 100 * MIB
FICLONERANGE = 0x4020940D


def new(path):
    return os.open(path, os.O_CREAT | os.O_RDWR)


def clone(source, target, start, size):
    fcntl.ioctl(target, FICLONERANGE, struct.pack("<qQQQ", source, start, size, start))


def fill(path, size):
    """Write until the file has a size or the file system is full."""
    file = new(path)
    with contextlib.suppress(OSError):
        for start in range(0, size, MIB):
            os.pwrite(file, os.urandom(MIB), start)
        os.fsync(file)
    return file


def attempt(kind):
    """Clone into one empty file after the other, until it fails."""
    source, other = fill(f"{kind}/source", SIZE), fill(f"{kind}/other", SIZE)
    for start in range(0, SIZE, 2 * PAGE):
        clone(other, source, start, PAGE)
    os.fsync(source)
    targets = [new(f"{kind}/target-{number}") for number in range(40)]
    for number in range(4):
        fill(f"{kind}/rest-{number}", 4 * SIZE)
    os.sync()
    for target in targets:
        try:
            clone(source, target, 0, SIZE)
            os.fsync(target)
        except OSError as error:
            size = os.fstat(target).st_size
            equal = all(os.pread(target, PAGE, at) == os.pread(source, PAGE, at) for at in range(0, size, PAGE))
            kept = "equal to the source's first" if equal else "not the source's"
            print(f"{kind}: {error.strerror}, and the file has {size // MIB} MiB, {kept}")
            return error.errno == errno.ENOSPC and 0 < size < SIZE and equal
    print(f"{kind}: no call failed")
    return False


sys.exit(0 if all([attempt("xfs"), attempt("btrfs")]) else 1)
EOF
"${PYTHON:-python3}" case.py
