"""Providers that wrap others: several under one name, or one whose arrays several ranks hold alike."""
