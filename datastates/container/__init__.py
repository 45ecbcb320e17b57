"""The container file that each rank writes: ZIP64 framing, index, ``data.pkl``, checksums and digests."""
