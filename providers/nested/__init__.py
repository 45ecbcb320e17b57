"""Nested values, such as a ``state_dict()``: taken apart into arrays and objects, and put together."""
