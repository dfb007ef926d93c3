"""Builds the library: `make late`."""

from tests.late.build import NoCompiler, build

try:
    build()
except NoCompiler as error:
    print(f"Not built, and the tests on it are left out: {error}")
