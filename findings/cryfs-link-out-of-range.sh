#!/bin/sh
# Behaviour: CryFS has no hard links, and link(2) on its mount fails with ERANGE, "Numerical result out of range". Other
#   file systems without them say EPERM, EOPNOTSUPP or ENOSYS, so programs that fall back at those do not here.
# Seen:
#   link: ERANGE
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, /dev/fuse, fusermount.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="cryfs=0.11.3-5 libspdlog1.10=1:1.10.0+ds-0.4 libfmt9=9.1.0+ds1-2 libcurl4=7.88.1-10+deb12u15 libboost-filesystem1.74.0=1.74.0+ds1-21 libboost-program-options1.74.0=1.74.0+ds1-21 libboost-chrono1.74.0=1.74.0+ds1-21 libboost-thread1.74.0=1.74.0+ds1-21"
place=$(mktemp -d)
trap 'umount "$place/mount" || true; rm -rf "$place"' EXIT
cd "$place"
for package in $DEBIAN; do
    apt-get download -q "$package" > apt.log 2>&1 || { cat apt.log; exit 77; }
done
for package in ./*.deb; do dpkg -x "$package" .; done
test -c /dev/fuse || exit 77
mkdir below mount
libraries=$(find "$place" -name '*.so.*' -printf '%h\n' | sort -u | tr '\n' ':')
cryfs() {
    CRYFS_FRONTEND=noninteractive CRYFS_NO_UPDATE_CHECK=true CRYFS_LOCAL_STATE_DIR="$place/state" \
        LD_LIBRARY_PATH="$libraries" usr/bin/cryfs "$@"
}
cryfs --version | head -1
echo password | cryfs below mount > cryfs.log 2>&1 || { cat cryfs.log; exit 77; }
cat > case.py <<'EOF'
import errno
import os
import sys

with open("mount/file", "wb") as file:
    file.write(b"data")
try:
    os.link("mount/file", "mount/name")
    said = "it is there"
except OSError as error:
    said = errno.errorcode[error.errno]
print(f"link: {said}")
sys.exit(0 if said == "ERANGE" else 1)
EOF
"${PYTHON:-python3}" case.py
