#!/bin/sh
# Behaviour: on a mount by mergerfs with its default options, two names of one file have two inode numbers, though
#   link() made them and the count of links is 2. So tools do not see that they are one file: du counts it twice, and tar,
#   cp -a and rsync -H write it twice. With the option use_ino they do see it.
# Seen: (one file of 8 MiB under two names)
#   default options: 2 links, one inode False, du 16 MiB, tar 16 MiB
#   use_ino: 2 links, one inode True, du 8 MiB, tar 8 MiB
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, FUSE, Debian's mergerfs.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="mergerfs=2.33.5-1"
[ -w /dev/fuse ] && [ "$(id -u)" = 0 ] || { echo "needs root and FUSE"; exit 77; }
place=$(mktemp -d)
trap 'umount "$place/default" "$place/use_ino" || true; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q "$DEBIAN" > apt.log 2>&1 && dpkg -x ./*.deb . || { cat apt.log; exit 77; }
usr/bin/mergerfs --version | head -1
mkdir branch default use_ino
usr/bin/mergerfs -o minfreespace=0 branch default || exit 77
usr/bin/mergerfs -o minfreespace=0,use_ino branch use_ino || exit 77
cat > case.py <<'EOF'
import os
import subprocess
import sys

MIB = 1 << 20


def look(mount):
    """The links of both names, whether they have one inode number, and the MiB that du and tar see."""
    first, second = os.stat(f"{mount}/first"), os.stat(f"{mount}/second")
    du = int(subprocess.run(["du", "-sk", mount], check=True, capture_output=True).stdout.split()[0])
    tar = len(subprocess.run(["tar", "-C", mount, "-cf", "-", "."], check=True, capture_output=True).stdout)
    return first.st_nlink, first.st_ino == second.st_ino, du // 1024, tar // MIB


with open("default/first", "wb") as file:
    file.write(os.urandom(8 * MIB))
os.link("default/first", "default/second")
seen = {}
for mount, name in {"default": "default options", "use_ino": "use_ino"}.items():
    seen[mount] = links, one, du, tar = look(mount)
    print(f"{name}: {links} links, one inode {one}, du {du} MiB, tar {tar} MiB")
sys.exit(0 if seen == {"default": (2, False, 16, 16), "use_ino": (2, True, 8, 8)} else 1)
EOF
"${PYTHON:-python3}" case.py
