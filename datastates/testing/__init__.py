"""The test suites for state providers and for stores, and the comparison of states that the first uses."""

from datastates.testing.equality import equal
from datastates.testing.provider_tests import ProviderTests
from datastates.testing.store_tests import StoreTests

__all__ = ["ProviderTests", "StoreTests", "equal"]
