#!/bin/sh
# Behaviour: on Btrfs mounted with compress=zstd, a file whose space was reserved by fallocate() is not compressed, also
#   not when its bytes are written again. The same bytes in a file without it take a thirtieth, and so does a copy of
#   the file. So a writer that reserves the space of a checkpoint gives up the compression that the mount was set to.
# Seen: (space of the file system that 64 MiB of repeated text take)
#   written: 2 MiB
#   fallocated, then written: 65 MiB
#   the second file, written again: 65 MiB
#   a copy of the second file: 2 MiB
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, loop devices, Btrfs in the kernel.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="btrfs-progs=6.2-1+deb12u2"
place=$(mktemp -d)
trap 'umount "$place/mount" || true; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q "$DEBIAN" > apt.log 2>&1 && dpkg -x ./*.deb . || { cat apt.log; exit 77; }
echo "Linux $(uname -r), $(sbin/mkfs.btrfs --version)"
truncate -s 400M image && sbin/mkfs.btrfs -q image > mkfs.log && mkdir mount
mount -t btrfs -o loop,compress=zstd image mount || exit 77
cat > case.py <<'EOF'
import os
import subprocess
import sys

MIB = 1 << 20
TEXT = (b"checkpoint " * MIB)[:MIB]


def used():
    os.sync()
    stats = os.statvfs("mount")
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize // MIB


def write(name, reserve=False):
    file = os.open(f"mount/{name}", os.O_CREAT | os.O_RDWR)
    if reserve:
        os.posix_fallocate(file, 0, 64 * MIB)
    for number in range(64):
        os.pwrite(file, TEXT, number * MIB)
    os.fsync(file)
    os.close(file)


start = used()
write("plain")
plain = used()
write("reserved", reserve=True)
reserved = used()
write("reserved")
again = used()
subprocess.run(["cp", "--reflink=never", "mount/reserved", "mount/copy"], check=True)
copied = used()
print(f"written: {plain - start} MiB")
print(f"fallocated, then written: {reserved - plain} MiB")
print(f"the second file, written again: {again - plain} MiB")
print(f"a copy of the second file: {copied - again} MiB")
described = max(plain - start, copied - again) < 16 and min(reserved, again) - plain > 60
sys.exit(0 if described else 1)
EOF
"${PYTHON:-python3}" case.py
