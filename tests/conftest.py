"""What all tests share."""

from __future__ import annotations

import pytest

# Before anybody imports it: its asserts then show the values that differ, as those of test files do.
pytest.register_assert_rewrite("kvlink.testing.conformance")
