"""The manifests of `deploy/kubernetes` are valid, and their numbers fit together."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import pytest

pytest.importorskip("yaml", reason="PyYAML is not installed")

from kubernetes_manifests import (
    DEPLOY,
    GIB,
    argument,
    container,
    environment,
    extra_config,
    objects,
    pod,
    size,
)

from kvsm.vllm.versions import TESTED

VERSIONS = ("1.30", "1.33", "1.36")
"""Of Kubernetes. 1.30 is the first one that accepts a preStop hook that sleeps without a feature gate."""

CHECKSUMS_AND_VLLM = 2 * GIB
"""Room in /dev/shm beside the host pool: checksums, and vLLM's own queues."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("one", objects(), ids=lambda one: one["kind"])
def test_each_object_fits_the_schema_of_kubernetes(one: dict[str, Any], version: str) -> None:
    """A field that Kubernetes does not know is an error too."""
    checker = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    checker.validate(one, version, strict=True)


def test_the_engine_has_time_to_end() -> None:
    """Before SIGTERM the hook runs, and both count against the grace period."""
    hook = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    timeout = int(argument("--shutdown-timeout"))
    assert timeout >= 30
    assert pod()["terminationGracePeriodSeconds"] >= hook + timeout + 30


def volumes() -> dict[str, dict[str, Any]]:
    return {one["name"]: one["emptyDir"] for one in pod()["volumes"]}


def mounts() -> dict[str, str]:
    """Path -> volume."""
    return {one["mountPath"]: one["name"] for one in container()["volumeMounts"]}


def test_shared_memory_holds_the_pool_and_counts_in_the_memory_limit() -> None:
    shm = volumes()[mounts()["/dev/shm"]]
    assert shm["medium"] == "Memory"
    pool = float(argument("--kv-offloading-size")) * GIB
    assert size(shm["sizeLimit"]) >= pool + CHECKSUMS_AND_VLLM
    assert size(container()["resources"]["limits"]["memory"]) >= size(shm["sizeLimit"]) + 16 * GIB


def claims() -> dict[str, int]:
    [found] = [one["spec"]["volumeClaimTemplates"] for one in objects() if one["kind"] == "StatefulSet"]
    return {one["metadata"]["name"]: size(one["spec"]["resources"]["requests"]["storage"]) for one in found}


def volume_of(path: str) -> str:
    """Return the volume of a directory, which must be just below a mount: a mount point itself may be open
    to other users, and kvsm makes no parents."""
    parent = str(PurePosixPath(path).parent)
    assert parent in mounts(), f"{path} is not just below a mount"
    return mounts()[parent]


def test_what_outlives_a_pod_is_on_claims_that_hold_it() -> None:
    options = extra_config()
    assert claims()[volume_of(options["disk_dir"])] >= 1.05 * options["disk_bytes"]
    assert claims()[volume_of(options["event_log"])] >= 2 * options["log_max_bytes"] + GIB
    assert mounts()[environment()["HF_HOME"]] in claims()


def test_the_host_pool_outlives_a_container() -> None:
    assert volume_of(extra_config()["pool_dir"]) == mounts()["/dev/shm"]


def test_any_user_id_can_use_the_files_of_another_one() -> None:
    """The group of the volumes is the group that kvsm shares its files with."""
    assert pod()["securityContext"]["fsGroup"] == extra_config()["file_group"] != 0


def test_every_place_that_is_written_is_a_volume() -> None:
    """The root file system is read-only."""
    assert container()["securityContext"]["readOnlyRootFilesystem"]
    assert {"/tmp", environment()["HOME"], environment()["XDG_CACHE_HOME"]} <= set(mounts())
    storage = sum(size(one["sizeLimit"]) for one in volumes().values() if one.get("medium") != "Memory")
    assert size(container()["resources"]["limits"]["ephemeral-storage"]) >= storage


def test_nothing_runs_as_root() -> None:
    assert pod()["securityContext"]["runAsNonRoot"]
    user = pod()["securityContext"]["runAsUser"]
    assert f"USER {user}\n" in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert container()["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_services_reach_the_port_of_the_engine() -> None:
    services = [one["spec"] for one in objects() if one["kind"] == "Service"]
    [port] = container()["ports"]
    assert port["containerPort"] == int(argument("--port"))
    assert [one["ports"][0]["targetPort"] for one in services] == [port["name"]] * len(services)
    assert len(services) == 2


def test_the_image_has_a_tested_vllm() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    [version] = re.findall(r"^FROM vllm/vllm-openai:v(\S+)$", dockerfile, re.MULTILINE)
    assert version in TESTED
    assert container()["image"].endswith(f":{version}")
