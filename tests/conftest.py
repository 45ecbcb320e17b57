"""Shared by all tests."""

from __future__ import annotations

import os

os.environ.setdefault("DATASTATES_HOST_CACHE", "64MiB")
