"""Carries plans out: the interface to the native core, its jobs, the size of its host cache, and timelines of work."""

from datastates.executor.executor import Executor
from datastates.executor.jobs import ReadJob, WriteJob
from datastates.executor.make import make_executor
from datastates.executor.timeline import Span, Stage

__all__ = ["Executor", "ReadJob", "Span", "Stage", "WriteJob", "make_executor"]
