"""The tests, as a package, so that they can import `conftest`, `plain` and other helpers."""
