"""The storage writer and ``async_save``."""
