#!/bin/sh
# Behaviour: localbucket makes an object of a PUT whose connection ended before the last byte of the body that its
#   Content-Length announces. The object has the bytes that came, and looks complete.
# Seen: (the bytes announced, sent, and stored)
#   announced 4, sent 2, stored 2
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="localbucket==1.2.1"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q --disable-pip-version-check $PINS || exit 77
mkdir -p buckets/bucket
cat > case.py <<'EOF'
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version

print("localbucket", version("localbucket"))
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [sys.executable, "-m", "localbucket", "--host", "127.0.0.1", "--port", str(port), "buckets"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    for _ in range(200):
        try:
            client = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            time.sleep(0.1)
    client.sendall(b"PUT /bucket/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n12")
    client.close()
    stored = None
    for _ in range(50):
        try:
            stored = urllib.request.urlopen(f"http://127.0.0.1:{port}/bucket/a").read()
            break
        except urllib.error.HTTPError:
            time.sleep(0.1)
    print(f"announced 4, sent 2, stored {'nothing' if stored is None else len(stored)}")
finally:
    server.kill()
sys.exit(0 if stored == b"12" else 1)
EOF
venv/bin/python case.py
