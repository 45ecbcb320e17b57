"""Integrations with training frameworks and libraries of metrics: the only package that imports them."""
