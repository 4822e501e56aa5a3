"""Validation of rendered objects: built-in kinds by Kubernetes' schemas, custom kinds by our field lists.

Custom kinds are described here from their public API references (KubeRay 1.4, Prometheus operator, KEDA 2).
An undescribed field fails, so new fields are looked up before they are used.
"""

from collections.abc import Mapping
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate

Object = dict[str, Any]
Schema = Mapping[str, Any]

KUBERNETES = ("1.25", "1.37")
"""The chart's minimum version, and the newest version with installed schemas."""

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_ANY: Schema = {"type": "object"}


def _block(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


_METADATA = _block(("name",), name={**_TEXT, "maxLength": 63}, labels=_TEXTS, annotations=_TEXTS)
_HEAD = _block(("rayStartParams", "template"), rayStartParams=_TEXTS, template=_ANY)
_WORKERS = _block(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName=_TEXT,
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    rayStartParams=_TEXTS,
    template=_ANY,
)
_RAY_CLUSTER = _block(
    ("headGroupSpec", "rayVersion"),
    rayVersion=_TEXT,
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=_block(
        version=_one_of("v1", "v2"),
        upscalingMode=_one_of("Default", "Aggressive", "Conservative"),
        idleTimeoutSeconds=_COUNT,
    ),
    gcsFaultToleranceOptions=_block(
        ("redisAddress",), redisAddress=_TEXT, redisPassword=_block(valueFrom=_ANY)
    ),
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "items": _WORKERS},
)
_RAY_SERVICE = _block(
    ("serveConfigV2", "rayClusterConfig"),
    serveConfigV2=_TEXT,
    rayClusterConfig=_RAY_CLUSTER,
    rayClusterDeletionDelaySeconds=_COUNT,
    serveService=_block(metadata=_block(annotations=_TEXTS), spec=_block(type=_TEXT)),
    upgradeStrategy=_block(type=_one_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None")),
)
_SECRET = _block(("name", "key"), name=_TEXT, key=_TEXT)
_AUTHORIZATION = _block(("credentials",), credentials=_SECRET)
_SCRAPE_CONFIG = _block(
    scrapeInterval=_TEXT,
    metricsPath=_TEXT,
    authorization=_AUTHORIZATION,
    staticConfigs=_list(_block(("targets",), targets=_list(_TEXT))),
    httpSDConfigs=_list(_block(("url",), url=_TEXT, authorization=_AUTHORIZATION)),
)
_RULE = {
    **_block(("alert", "expr"), alert=_TEXT, expr=_TEXT, labels=_TEXTS, annotations=_TEXTS),
}
_RULE["properties"] = {**_RULE["properties"], "for": _TEXT}
_PROMETHEUS_RULE = _block(
    ("groups",), groups=_list(_block(("name", "rules"), name=_TEXT, rules=_list(_RULE)))
)
_SCALED_OBJECT = _block(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=_block(("name",), name=_TEXT),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    pollingInterval=_COUNT,
    advanced=_block(horizontalPodAutoscalerConfig=_block(behavior=_ANY)),
    triggers=_list(
        _block(
            ("type", "metadata"),
            type=_one_of("prometheus"),
            metricType=_one_of("AverageValue", "Value"),
            metadata=_block(
                ("serverAddress", "query", "threshold"),
                serverAddress=_TEXT,
                query=_TEXT,
                threshold=_TEXT,
                ignoreNullValues=_one_of("true", "false"),
            ),
        )
    ),
)
_CUSTOM: Mapping[tuple[str, str], Schema] = {
    ("ray.io/v1", "RayService"): _RAY_SERVICE,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
    ("monitoring.coreos.com/v1alpha1", "ScrapeConfig"): _SCRAPE_CONFIG,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
}


def check_object(found: Object, version: str) -> None:
    """Check that this Kubernetes version accepts the object and knows all of its fields.

    Raises:
        jsonschema.ValidationError, kubernetes_validate.ValidationError: it does not.
    """
    spec = _CUSTOM.get((found["apiVersion"], found["kind"]))
    if spec is None:
        kubernetes_validate.validate(found, version, strict=True)
        return
    whole = _block(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=_TEXT,
        kind=_TEXT,
        metadata=_METADATA,
        spec=spec,
    )
    jsonschema.validate(found, whole)
    for inner in _builtin_parts(found):
        kubernetes_validate.validate(inner, version, strict=True)


def _builtin_parts(found: Object) -> list[Object]:
    """Return the built-in parts of a custom object, each wrapped in a kind that contains it."""
    spec = found["spec"]
    if found["kind"] == "ScaledObject":
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        target = {"kind": "Deployment", **spec["scaleTargetRef"]}
        scaler = {"scaleTargetRef": target, "maxReplicas": spec["maxReplicaCount"], "behavior": behavior}
        return [_object("autoscaling/v2", "HorizontalPodAutoscaler", spec=scaler)]
    if found["kind"] != "RayService":
        return []
    cluster = spec["rayClusterConfig"]
    parts = [
        _object("v1", "PodTemplate", template=group["template"])
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    if service := spec.get("serveService"):
        parts.append(_object("v1", "Service", spec=service["spec"]))
    if redis := cluster.get("gcsFaultToleranceOptions"):
        variable = {"name": "REDIS_PASSWORD", **redis["redisPassword"]}
        pod = {"containers": [{"name": "ray", "env": [variable]}]}
        parts.append(_object("v1", "Pod", spec=pod))
    return parts


def _object(api: str, kind: str, **content: Any) -> Object:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": "part"}, **content}
