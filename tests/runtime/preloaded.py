"""A module that the fork server imports in tests."""
