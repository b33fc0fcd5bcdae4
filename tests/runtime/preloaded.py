"""A module that tests have the fork server import."""
