"""The test suite for state providers, and the comparison of states that it uses."""

from datastates.testing.equality import equal
from datastates.testing.provider_tests import ProviderTests

__all__ = ["ProviderTests", "equal"]
