"""A package, so that tests can share what is in `conftest` and `plain`."""
