"""The test suites for state providers, stores and tiers, and the comparison of states that the first uses."""

from datastates.testing.provider_tests import ProviderTests, equal
from datastates.testing.store_tests import StoreTests
from datastates.testing.tier_tests import TierTests

__all__ = ["ProviderTests", "StoreTests", "TierTests", "equal"]
