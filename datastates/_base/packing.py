"""Messages between ranks, as msgpack. Keys may have any code points: a surrogate is packed as it is."""

from __future__ import annotations

from functools import partial

import msgpack

pack = partial(msgpack.packb, unicode_errors="surrogatepass")
unpack = partial(msgpack.unpackb, unicode_errors="surrogatepass")
