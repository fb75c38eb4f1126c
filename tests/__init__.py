"""Tests. `tests.oracles` holds float64 textbook code that shares nothing with the package."""
