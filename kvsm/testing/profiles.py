"""Hypothesis profiles, registered when this module is imported, and how machines use them.

=============  ==========  =========================================================================
profile        examples    for
=============  ==========  =========================================================================
`kvsm`         100 of 30   a developer: failed examples are kept, and tried first the next time
`kvsm-ci`      300 of 30   CI: new examples in every run; a failure says how to repeat it
`kvsm-long`    5000 of 60  a night
=============  ==========  =========================================================================

No profile has a deadline, because a slow machine is no bug. Under CI Hypothesis loads a profile of its own,
which repeats the same hundred examples in every run. So name a profile and a seed; a run depends on nothing
else:

    pytest --hypothesis-profile=kvsm-ci --hypothesis-seed=$(date +%Y%m%d)

Then each day has its own examples, and the same line with that day's seed repeats them. With the failing
steps Hypothesis prints a `@reproduce_failure` line. The event log that the pytest plugin writes outlives
both, and new versions of Hypothesis. `conftest.py` must import this module, so that the profiles are known.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

LONG = 1000
"""With that many examples a run is long enough to aim at a target."""

SHORT = 30
"""How many steps a run has otherwise."""

_plain = settings.get_profile("default")
"""The base of the profiles. The current profile is not: under CI that is the one that repeats examples."""

PROFILES: dict[str, settings] = {
    "kvsm": settings(_plain, deadline=None, print_blob=True),
    "kvsm-ci": settings(_plain, deadline=None, print_blob=True, max_examples=300, database=None),
    "kvsm-long": settings(
        _plain,
        deadline=None,
        print_blob=True,
        max_examples=5000,
        stateful_step_count=60,
        # Long examples are slow to generate, on purpose.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    ),
}

for _name, _profile in PROFILES.items():
    settings.register_profile(_name, _profile)


def for_machines(chosen: settings) -> settings:
    """The settings of a machine, made from the chosen ones.

    - No explanations: Hypothesis traces hundreds of runs to find arguments that do not matter; that takes
      minutes.
    - One bug at a time is enough to shrink.
    - `SHORT` runs shrink in seconds; Hypothesis' usual fifty steps take minutes.
    - With few examples, aiming at many copies in flight (`hypothesis.target`) costs more variety than it
      gives.
    """
    is_long = chosen.max_examples >= LONG
    left_out = {Phase.explain} if is_long else {Phase.explain, Phase.target}
    return settings(
        chosen,
        phases=[phase for phase in chosen.phases if phase not in left_out],
        report_multiple_bugs=False,
        stateful_step_count=chosen.stateful_step_count if is_long else SHORT,
    )
