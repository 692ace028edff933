"""Imported before every test module: see `library_ops`."""

import tests.library_ops  # noqa: F401
