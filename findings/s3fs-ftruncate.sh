#!/bin/sh
# Behaviour: on s3fs, ftruncate() of a new file whose bytes were not flushed yet returns without an error and changes
#   nothing: the file keeps its length, and so does the object that is uploaded. After an fsync() the same call cuts it.
# Seen:
#   not flushed: 8192 bytes, ftruncate to 100 returns, 8192 bytes, closed 8192
#   flushed: 8192 bytes, ftruncate to 100 returns, 100 bytes, closed 100
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: root, FUSE, Debian's s3fs.
set -eu
sed -n 's/^# //p' "$0"
PINS="moto[server]==5.2.5 boto3==1.44.8"
DEBIAN="s3fs=1.90-1"
[ -w /dev/fuse ] && [ "$(id -u)" = 0 ] || { echo "needs root and FUSE"; exit 77; }
place=$(mktemp -d)
trap 'umount "$place/mount" || true; exec 3>&-; wait; rm -rf "$place"' EXIT
cd "$place"
apt-get download -q "$DEBIAN" > apt.log 2>&1 && dpkg -x ./*.deb . || { cat apt.log; exit 77; }
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
usr/bin/s3fs --version | head -n 1
cat > bucket.py <<'EOF'
import sys

import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://{}:{}".format(*server.get_host_and_port())
keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="bucket")
print(url, flush=True)
sys.stdin.read()
EOF
mkfifo end
venv/bin/python bucket.py < end > url 2> server.log &
exec 3> end
for _ in $(seq 300); do [ -s url ] && break; sleep 0.1; done
echo x:y > passwords && chmod 600 passwords && mkdir mount
usr/bin/s3fs bucket mount -o "passwd_file=$place/passwords,url=$(cat url),use_path_request_style" || exit 77
cat > case.py <<'EOF'
import os
import sys

seen = []
for name in ("not flushed", "flushed"):
    file = os.open(f"mount/{name}", os.O_CREAT | os.O_RDWR)
    os.write(file, bytes(8192))
    if name == "flushed":
        os.fsync(file)
    before = os.fstat(file).st_size
    os.ftruncate(file, 100)
    after = os.fstat(file).st_size
    os.close(file)
    seen.append((after, os.stat(f"mount/{name}").st_size))
    print(f"{name}: {before} bytes, ftruncate to 100 returns, {after} bytes, closed {seen[-1][1]}")
sys.exit(0 if seen == [(8192, 8192), (100, 100)] else 1)
EOF
venv/bin/python case.py
