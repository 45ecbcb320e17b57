"""moto's server with a lock for creating: moto looks for a name, and then makes the object, without one."""

import sys
import threading

from moto import server
from moto.s3.responses import S3Response

_lock, _put = threading.Lock(), S3Response.put_object


def _put_alone(self: S3Response) -> object:
    with _lock:
        return _put(self)


S3Response.put_object = _put_alone
server.main(sys.argv[1:])
