"""Carries plans out: the interface to the native core, its jobs, the size of its host cache, and timelines of work."""
