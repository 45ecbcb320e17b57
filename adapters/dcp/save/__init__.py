"""The storage writer, the stager and ``async_save``."""
