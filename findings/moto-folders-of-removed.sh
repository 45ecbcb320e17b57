#!/bin/sh
# Behaviour: in a bucket that keeps versions, moto's lists with a delimiter name folders of which every object has been
#   removed, for ever. Lists without a delimiter do not show the objects. radosgw names no such folder.
# Seen: (the folders in `runs/` once all objects of the first of two were removed)
#   plain bucket: folders runs/2/, objects runs/2/a
#   bucket with versions: folders runs/1/ runs/2/, objects runs/2/a
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="moto==5.2.5 boto3==1.44.8"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
cat > case.py <<'EOF'
import sys
from importlib.metadata import version

import boto3
from moto import mock_aws

print("moto", version("moto"))
mock_aws().start()
keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
s3 = boto3.client("s3", **keys)
seen = []
for bucket, name in (("plain", "plain bucket"), ("versions", "bucket with versions")):
    s3.create_bucket(Bucket=bucket)
    if bucket == "versions":
        s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for key in ("runs/1/a", "runs/2/a"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"data")
    s3.delete_object(Bucket=bucket, Key="runs/1/a")
    answer = s3.list_objects_v2(Bucket=bucket, Prefix="runs/", Delimiter="/")
    folders = [one["Prefix"] for one in answer["CommonPrefixes"]]
    objects = [one["Key"] for one in s3.list_objects_v2(Bucket=bucket, Prefix="runs/")["Contents"]]
    seen.append((folders, objects))
    print(f"{name}: folders {' '.join(folders)}, objects {' '.join(objects)}")
sys.exit(0 if seen == [(["runs/2/"], ["runs/2/a"]), (["runs/1/", "runs/2/"], ["runs/2/a"])] else 1)
EOF
venv/bin/python case.py
