"""The objects of `deploy/kubernetes`, and what they say about the engine."""

from __future__ import annotations

import json
from typing import Any

import yaml
from places import ROOT

DEPLOY = ROOT / "deploy" / "kubernetes"
GIB = 1 << 30
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": GIB, "Ti": 1 << 40}


def objects() -> list[dict[str, Any]]:
    """Return each object of each manifest."""
    return [
        one
        for path in sorted(DEPLOY.glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def pod() -> dict[str, Any]:
    """Return the specification of the engine's pod."""
    [found] = [one["spec"]["template"]["spec"] for one in objects() if one["kind"] == "StatefulSet"]
    return dict(found)


def container() -> dict[str, Any]:
    [found] = pod()["containers"]
    return dict(found)


def environment() -> dict[str, str]:
    return {one["name"]: one["value"] for one in container()["env"]}


def argument(name: str) -> str:
    """Return the value of an argument, which is written as `--name=value` or as two words."""
    args = container()["args"]
    if name in args:
        return str(args[args.index(name) + 1])
    [found] = [one.partition("=")[2] for one in args if one.startswith(f"{name}=")]
    return str(found)


def extra_config() -> dict[str, Any]:
    """Return the options of `KvsmConnector`."""
    return dict(json.loads(argument("--kv-transfer-config"))["kv_connector_extra_config"])


def size(text: str) -> int:
    """Return a quantity of Kubernetes such as 20Gi in bytes."""
    return int(text[:-2]) * UNITS[text[-2:]]
