"""Integrations with training frameworks: the only package that imports them."""
