"""Hypothesis, for all tests: no deadline, because a slow machine is no bug.

Under CI Hypothesis loads a profile of its own (no deadline either, the same examples every time); new
examples are hunted where tests run without it.
"""

from __future__ import annotations

import os

from hypothesis import settings

if "CI" not in os.environ:
    settings.register_profile("kvsm", deadline=None)
    settings.load_profile("kvsm")
