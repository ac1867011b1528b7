"""The numbers of docs/report.md are those of the files and tables that it names."""

from __future__ import annotations

import re
from statistics import mean, median

import pytest
from museum import EXHIBITS
from museum.found import FOUND
from museum.taxonomy import STUDY_SYMPTOMS, TAXONOMY, Cause, Symptom
from mutants import MUTANTS
from mutants.found import FOUND as FOUND_MUTANTS
from report_pictures import RESULTS, Bars, bar_chart, control_plane, pictures, whatif_differences
from write_docs import DOCS

from kvsm.properties import Property

TEXT = " ".join((DOCS / "report.md").read_text(encoding="utf-8").split())


def results(name: str) -> str:
    return (RESULTS / name).read_text(encoding="utf-8")


def test_each_exhibit_has_one_place_in_the_taxonomy() -> None:
    assert [*TAXONOMY] == [*EXHIBITS]
    assert {place.symptom for place in TAXONOMY.values()} == {*Symptom} == {*STUDY_SYMPTOMS}
    assert {place.cause for place in TAXONOMY.values()} == {*Cause}


@pytest.mark.parametrize(
    "number",
    [
        "516,052",
        "138,366",
        "27,028",
        "15,256",
        "10,296,731",
        "4,343,322",
        "38,150",
        "1,701",
        "694",
        "38 s on two cores",
        "170 s of CPU time",
    ],
)
def test_what_was_explored_and_proved_is_what_verification_says(number: str) -> None:
    page = " ".join((DOCS / "verification.md").read_text(encoding="utf-8").split())
    assert number in page.replace("170 s of CPU time**", "170 s of CPU time")
    assert number in TEXT


def test_the_speed_of_conformance_is_what_verification_says() -> None:
    page = (DOCS / "verification.md").read_text(encoding="utf-8")
    offload, requests = re.findall(
        r"([\d,]+) events a second for the offload protocol[^.]*?([\d,]+) for the", page
    )[0]
    assert f"{offload} and {requests} events a second" in TEXT


def test_figures_of_the_museum() -> None:
    steps = [one.steps for one in FOUND.values()]
    assert f"in {min(steps)} to {max(steps)} steps, and half of them in at most {median(steps):g}" in TEXT
    assert f"{len(MUTANTS)} mutants" in TEXT
    assert f"{len(FOUND_MUTANTS)} are found" in TEXT
    assert len(Property) == 19
    assert "nineteen properties" in TEXT


def test_figures_of_the_control_plane() -> None:
    medians = {(trace, contestant): value for trace, contestant, value, _ in control_plane()}
    logged, bare = medians["trace", "kvsm, log on disk"], medians["trace", "kvsm, no log"]
    assert f"{logged:.3f} us with the log on disk and {bare:.3f} us without it" in TEXT
    assert f"the log adds {logged - bare:.3f} us" in TEXT
    one, without = medians["one block", "kvsm, log on disk"], medians["one block", "kvsm, no log"]
    assert f"it adds {one - without:.1f} us to {without:.1f} us" in TEXT
    ratios = re.findall(r"vLLM CPUOffloadingManager \| [^|]+ \| ([\d.]+) \|", results("control_plane.md"))
    assert f"by {ratios[0]} and {ratios[1]} times" in TEXT


def test_figures_of_the_log() -> None:
    sizes = dict(
        re.findall(
            r"^\| (large batches|small events) \([^)]*\) \| [\d,]+ \| [\d,]+ \| ([\d.]+)",
            results("log_replay.md"),
            re.MULTILINE,
        )
    )
    assert f"batch takes {sizes['large batches']} bytes in addition to its key" in TEXT
    assert f"one of a small event {sizes['small events']}" in TEXT


def test_figures_in_vllm() -> None:
    rows = dict(re.findall(r"^\| (\w+Connector) \| [^|]+ \| ([\d.]+) ", results("vllm_cpu.md"), re.MULTILINE))
    assert f"served at {rows['KvsmConnector']} times the requests per second" in TEXT
    assert f"reach {rows['OffloadingConnector']} and {rows['SimpleCPUOffloadConnector']} times" in TEXT
    beside = re.search(
        r"^\| KvsmConnector \| [^|]+ \| [^|]+ \| ([\d.]+) ", results("vllm_cpu.md"), re.MULTILINE
    )
    assert beside is not None
    assert f"reaches {beside[1]} times the better one" in TEXT
    share = re.findall(r"^\| KvsmConnector \|.*\| ([\d.]+)% \(", results("vllm_cpu.md"), re.MULTILINE)[-1]
    assert f"take {share} % of the engine thread's time" in TEXT
    phases = re.findall(
        r"^\| (\w+) \| ([\d.]+) \(\w+\) \| ([\d.]+) \(", results("connector_steps.md"), re.MULTILINE
    )
    medians = [float(middle) for _, middle, _ in phases]
    assert f"takes {min(medians)} to {max(medians)} of the time" in TEXT
    ending = next(every for phase, _, every in phases if phase == "ending")
    assert f"requests end it takes {ending} times" in TEXT


def test_figures_on_a_gpu() -> None:
    rows = dict(
        re.findall(
            r"^\| 64 KiB \| 1024 \| [^|]+ \| (store|load) \| \w+ \| [\d.]+ \| ([\d.]+) \|",
            results("copies_gpu.md"),
            re.MULTILINE,
        )
    )
    assert f"reach {rows['load']} of what one contiguous copy reaches, and stores {rows['store']}" in TEXT


def test_figures_of_predictions_and_reports() -> None:
    differences = whatif_differences()
    assert f"In {len(differences)} comparisons" in TEXT
    assert f"off by {mean(differences):.2f} points in the mean and by {max(differences):.2f} at most" in TEXT
    named = re.search(r"two findings: ([\d.]+) % \(\d+ of (\d+)\)", results("findings.md"))
    assert named is not None
    assert f"Of {named[2]} incidents" in TEXT
    assert f"first two findings for {named[1]} %" in TEXT
    assert "named 88.6 %" in TEXT
    assert "named 88.6 %" in " ".join(results("findings.md").split())


def test_the_report_shows_each_of_its_pictures() -> None:
    assert {*re.findall(r"\(pictures/(report-[\w-]+\.svg)\)", TEXT)} == {*pictures()}


def test_a_bar_is_as_long_as_its_value() -> None:
    """Twice the value is twice the length, and text that looks like markup is shown as text."""
    drawn = bar_chart("a < b", [Bars("one", (1.0,), ("1",)), Bars("two", (2.0,), ("2",))])
    lengths = [float(one) for one in re.findall(r'<rect x="270.0" .*?width="([\d.]+)"', drawn)]
    assert lengths[1] == pytest.approx(2 * lengths[0])
    assert "a &lt; b" in drawn
