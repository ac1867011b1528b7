"""Hypothesis profiles, registered when this module is imported, and how machines use the profile in force.

=============  ==========  =========================================================================
profile        examples    for
=============  ==========  =========================================================================
`kvsm`         100 of 30   a developer: examples that failed are kept, and tried first the next time
`kvsm-ci`      300 of 30   CI: new examples in every run, and a failure says how to have it again
`kvsm-long`    5000 of 60  a night
=============  ==========  =========================================================================

None has a deadline: a slow machine is no bug. Under CI Hypothesis loads a profile of its own by itself, which
repeats the same hundred examples for ever. So name one, and the seed, which is all that a run depends on:

    pytest --hypothesis-profile=kvsm-ci --hypothesis-seed=$(date +%Y%m%d)

Each day has examples of its own then, and the same line with that day's seed has them again. Beside the
failing steps Hypothesis prints a `@reproduce_failure` line; the event log that the pytest plugin writes
outlives both, and versions of Hypothesis. For the profile to be known, `conftest.py` imports this module.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

LONG = 1000
"""Examples from which on a run is long enough to aim at something."""

SHORT = 30
"""Steps of a run otherwise."""

_plain = settings.get_profile("default")
"""Not the current profile, from which a new one would inherit: under CI that is the one to get away from."""

PROFILES: dict[str, settings] = {
    "kvsm": settings(_plain, deadline=None, print_blob=True),
    "kvsm-ci": settings(_plain, deadline=None, print_blob=True, max_examples=300, database=None),
    "kvsm-long": settings(
        _plain,
        deadline=None,
        print_blob=True,
        max_examples=5000,
        stateful_step_count=60,
        # A long example is slow to generate, and that is what was asked for.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    ),
}

for _name, _profile in PROFILES.items():
    settings.register_profile(_name, _profile)


def for_machines(chosen: settings) -> settings:
    """The settings that a machine runs with, where these are chosen.

    Hypothesis explains which arguments did not matter by tracing hundreds of runs, which takes minutes here;
    it shrinks every bug that it meets on the way, and one at a time is enough; and it shrinks `SHORT` runs in
    seconds that take minutes at its usual fifty steps. With few examples, to aim at many copies in flight
    (`hypothesis.target`) costs more variety than it gives.
    """
    is_long = chosen.max_examples >= LONG
    left_out = {Phase.explain} if is_long else {Phase.explain, Phase.target}
    return settings(
        chosen,
        phases=[phase for phase in chosen.phases if phase not in left_out],
        report_multiple_bugs=False,
        stateful_step_count=chosen.stateful_step_count if is_long else SHORT,
    )
