"""Hypothesis, for all tests: no deadline, because a slow machine is no bug.

CI names a profile of `kvsm.testing.profiles` and the day's seed, so each day has examples of its own.
"""

from __future__ import annotations

import os

from hypothesis import settings

if "CI" in os.environ:
    # Not elsewhere: a mutant is chosen before kvsm is imported.
    import kvsm.testing.profiles  # noqa: F401  (registers the profiles)
else:
    settings.register_profile("kvsm", deadline=None)
settings.load_profile("kvsm")
