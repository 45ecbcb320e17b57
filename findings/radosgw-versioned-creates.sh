#!/bin/sh
# Behaviour: radosgw honours `If-None-Match: *` in a bucket, so that of many creates of one object one is done. In a
#   bucket that keeps versions it ignores the condition: each create is done, with 200, and replaces what is read. So
#   locks and commits that are built on conditional creates hold until somebody turns versioning on.
# Seen: (the answers to two creates of one object, and whose bytes are read)
#   plain bucket: 200, 412, first
#   bucket with versions: 200, 200, second
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs: Debian's ceph, 2 GB of disk.
set -eu
sed -n 's/^# //p' "$0"
PINS="boto3==1.44.8"
DEBIAN="radosgw=16.2.15+ds-0+deb12u2"
BESIDE="ceph-mon ceph-osd ceph-base ceph-common librados2"
LIBRARIES="libaio1 libboost-context1.74.0 libboost-filesystem1.74.0 libboost-iostreams1.74.0 libboost-thread1.74.0
libcurl3-gnutls libdaxctl1 libfmt9 libgoogle-perftools4 libibverbs1 libkmod2 libleveldb1d liblua5.3-0 libndctl6
libnl-3-200 libnl-route-3-200 liboath0 libpmem1 librabbitmq4 librdmacm1 librtmp1 libsnappy1v5 libunwind8"
place=$(mktemp -d)
daemons=""
trap 'kill $daemons || true; wait; rm -rf "$place"' EXIT
cd "$place"
for name in $BESIDE; do DEBIAN="$DEBIAN $name=${DEBIAN##*=}"; done
apt-get download -q $DEBIAN $LIBRARIES > apt.log 2>&1 || { cat apt.log; exit 77; }
for package in *.deb; do dpkg -x "$package" .; done
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
libraries="$place/usr/lib/$(uname -m)-linux-gnu"
export LD_LIBRARY_PATH="$libraries:$libraries/ceph" PATH="$place/usr/bin:$PATH" CEPH_CONF="$place/ceph.conf"
mkdir monitor disk gateway
set -- $(venv/bin/python -c 'import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in held))')
cat > ceph.conf <<END
[global]
fsid = 6f2a1c1e-0000-4000-8000-000000000057
mon host = [v2:127.0.0.1:$1]
public addr = 127.0.0.1
keyring = $place/keyring
run dir = $place
admin socket = $place/\$name.asok
pid file =
log file = $place/\$name.log
plugin dir = $libraries/ceph
erasure code dir = $libraries/ceph/erasure-code
osd class dir = $libraries/rados-classes
osd pool default size = 1
osd pool default pg num = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data = $place/monitor
mon data avail crit = 1
osd data = $place/disk
bluestore block size = 2147483648
rgw data = $place/gateway
rgw frontends = beast endpoint=127.0.0.1:$2
END
export GATEWAY="http://127.0.0.1:$2"
radosgw --version
{
    ceph-authtool --create-keyring keyring --gen-key -n mon. --cap mon 'allow *'
    for who in client.admin client.rgw osd.0; do
        ceph-authtool keyring --gen-key -n $who --cap mon 'allow *' --cap osd 'allow *'
    done
    monmaptool --create --fsid 6f2a1c1e-0000-4000-8000-000000000057 --addv a "[v2:127.0.0.1:$1]" map
    ceph-mon -i a --mkfs --monmap map --keyring keyring
} > set-up.log 2>&1 || { cat set-up.log; exit 77; }
ceph-mon -f -i a > mon.out 2>&1 &
daemons="$daemons $!"
cat > disk.py <<'EOF'
import ctypes
import json
import sys

rados, handle = ctypes.CDLL("librados.so.2"), ctypes.c_void_p()
assert rados.rados_create(ctypes.byref(handle), b"admin") == 0
assert rados.rados_conf_read_file(handle, b"ceph.conf") == 0
assert rados.rados_connect(handle) == 0
words = json.dumps({"prefix": "osd new", "uuid": sys.argv[1]}).encode()
answers = [ctypes.byref(kind()) for kind in (ctypes.c_char_p, ctypes.c_size_t) * 2]
sys.exit(-rados.rados_mon_command(handle, (ctypes.c_char_p * 1)(words), 1, b"", 0, *answers))
EOF
disk=6f2a1c1e-0000-4000-8000-000000000058
timeout 60 venv/bin/python disk.py $disk && ceph-osd -i 0 --mkfs --osd-uuid $disk > mkfs.log 2>&1 || exit 77
ceph-osd -f -i 0 > osd.out 2>&1 &
daemons="$daemons $!"
radosgw -f -n client.rgw > gateway.out 2>&1 &
daemons="$daemons $!"
timeout 120 radosgw-admin user create --uid=u --display-name=u --access-key=key --secret=secret > user.log || exit 77
cat > case.py <<'EOF'
import os
import sys

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

config = Config(retries={"max_attempts": 30, "mode": "standard"}, request_checksum_calculation="when_required")
keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
s3 = boto3.client("s3", endpoint_url=os.environ["GATEWAY"], config=config, **keys)


def create(bucket, data):
    try:
        answer = s3.put_object(Bucket=bucket, Key="a", Body=data, IfNoneMatch="*")
    except ClientError as error:
        answer = error.response
    return answer["ResponseMetadata"]["HTTPStatusCode"]


seen = []
for bucket, name in (("plain", "plain bucket"), ("versions", "bucket with versions")):
    s3.create_bucket(Bucket=bucket)
    if bucket == "versions":
        s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    told = [create(bucket, data) for data in (b"first", b"second")]
    seen.append((*told, s3.get_object(Bucket=bucket, Key="a")["Body"].read().decode()))
    print(f"{name}: {seen[-1][0]}, {seen[-1][1]}, {seen[-1][2]}")
sys.exit(0 if seen == [(200, 412, "first"), (200, 200, "second")] else 1)
EOF
timeout 300 venv/bin/python case.py
