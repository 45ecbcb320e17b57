"""Providers that wrap others: several under one name, or one whose arrays are the same on several ranks."""
