"""Hypothesis profiles, registered when this module is imported, and the settings of machines.

=============  ===================  ================================================================
profile        examples x steps     for
=============  ===================  ================================================================
`kvsm`         100 x 30             developers: failed examples are stored, and tried first next time
`kvsm-ci`      300 x 30             CI: new examples in every run; a failure says how to repeat it
`kvsm-long`    5000 x 60            nightly runs
=============  ===================  ================================================================

No profile has a deadline, because a slow machine is no bug. Under CI Hypothesis loads its own profile, which
repeats the same hundred examples in every run. So choose a profile and a seed; the examples of a run depend
on nothing else:

    pytest --hypothesis-profile=kvsm-ci --hypothesis-seed=$(date +%Y%m%d)

Then each day has its own examples, and the same command with that day's seed repeats them. After the failing
steps Hypothesis prints a `@reproduce_failure` line, which works only with the same version of Hypothesis. The
event log that the pytest plugin writes stays readable. `conftest.py` must import this module, to register the
profiles.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

LONG = 1000
"""Number of examples from which on aiming at a target (`hypothesis.target`) pays."""

SHORT = 30
"""Number of steps in an example with fewer examples than `LONG`."""

_plain = settings.get_profile("default")
"""The base of the profiles. Not the current profile: under CI that one repeats the same examples."""

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
    """Adapt the chosen settings to a machine.

    - No explain phase: Hypothesis would trace hundreds of runs to find irrelevant arguments, which takes
      minutes.
    - One bug at a time is shrunk.
    - `SHORT` steps, which shrink in seconds; Hypothesis' default of fifty takes minutes.
    - With few examples no target phase: aiming at many copies in flight would cost variety.
    """
    is_long = chosen.max_examples >= LONG
    left_out = {Phase.explain} if is_long else {Phase.explain, Phase.target}
    return settings(
        chosen,
        phases=[phase for phase in chosen.phases if phase not in left_out],
        report_multiple_bugs=False,
        stateful_step_count=chosen.stateful_step_count if is_long else SHORT,
    )
