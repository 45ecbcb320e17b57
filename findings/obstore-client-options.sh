#!/bin/sh
# Behaviour: a store of obstore that is given any client_options forgets the options of the client that the environment
#   has. With AWS_ALLOW_HTTP=true and an endpoint of http, a time-out given to the constructor makes every request fail
#   before it is sent, as plain HTTP is not allowed any more. The error speaks of a "builder error".
# Seen: (the options, and what came of a request to a local server, with AWS_ENDPOINT_URL and AWS_ALLOW_HTTP set)
#   None listed
#   {'timeout': '30s'} builder error
#   {'timeout': '30s', 'allow_http': True} listed
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="obstore==0.12.1 localbucket==1.2.1"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
mkdir buckets
cat > case.py <<'EOF'
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version

import obstore
from obstore.store import S3Store

print("obstore", version("obstore"))
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [sys.executable, "-m", "localbucket", "--port", str(port), "buckets"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
url = f"http://127.0.0.1:{port}"
try:
    for _ in range(200):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
            break
        except OSError:
            time.sleep(0.1)
    os.environ.update(AWS_ENDPOINT_URL=url, AWS_ALLOW_HTTP="true", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    seen = []
    for options in (None, {"timeout": "30s"}, {"timeout": "30s", "allow_http": True}):
        store = S3Store("bucket", client_options=options, retry_config={"max_retries": 0})
        try:
            obstore.list_with_delimiter(store)
            seen.append("listed")
        except Exception as error:
            seen.append("builder error" if "builder error" in str(error) else str(error))
        print(options, seen[-1])
finally:
    server.kill()
sys.exit(0 if seen == ["listed", "builder error", "listed"] else 1)
EOF
venv/bin/python case.py
