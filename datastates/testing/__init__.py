"""The conformance suite for state providers, and the comparison that it uses."""

from datastates.testing.equality import equal
from datastates.testing.provider_tests import ProviderTests

__all__ = ["ProviderTests", "equal"]
