"""Nested values, such as a ``state_dict()``: splits them into arrays and objects, and puts them together again."""
