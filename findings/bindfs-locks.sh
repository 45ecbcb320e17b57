#!/bin/sh
# Behaviour: the kernel keeps the locks of a FUSE file system that does not pass them on, for each mount apart. So two
#   mounts by bindfs of one folder (in two containers, say) both get the exclusive lock of one file, by flock() and by
#   fcntl(), and so does a process that opens it in the folder itself. All calls succeed.
# Seen: (while the first mount holds the lock, who else gets it)
#   flock: first mount False, second mount True, folder True
#   lockf: first mount False, second mount True, folder True
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, FUSE, Debian's bindfs.
set -eu
sed -n 's/^# //p' "$0"
DEBIAN="bindfs=1.14.7-1"
[ -w /dev/fuse ] && [ "$(id -u)" = 0 ] || { echo "needs root and FUSE"; exit 77; }
place=$(mktemp -d)
trap 'umount "$place/first" "$place/second" || true; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q "$DEBIAN" > apt.log 2>&1 && dpkg -x ./*.deb . || { cat apt.log; exit 77; }
usr/bin/bindfs --version
mkdir folder first second
usr/bin/bindfs folder first && usr/bin/bindfs folder second || exit 77
cat > case.py <<'EOF'
import fcntl
import subprocess
import sys

TRY = "import fcntl, sys; fcntl.{}(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
PLACES = {"first mount": "first", "second mount": "second", "folder": "folder"}


def gets(call, place):
    command = [sys.executable, "-c", TRY.format(call), f"{place}/file"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


open("folder/file", "w").close()
described = True
for call in ("flock", "lockf"):
    with open("first/file", "r+") as file:
        getattr(fcntl, call)(file, fcntl.LOCK_EX)
        seen = {name: gets(call, place) for name, place in PLACES.items()}
    print(f"{call}: " + ", ".join(f"{name} {got}" for name, got in seen.items()))
    described &= list(seen.values()) == [False, True, True]
sys.exit(0 if described else 1)
EOF
"${PYTHON:-python3}" case.py
