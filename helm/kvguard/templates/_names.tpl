{{- define "kvguard.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvguard.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trimSuffix "-" -}}
{{- else -}}
{{- $name := .Release.Name -}}
{{- if not (contains (include "kvguard.name" .) $name) -}}{{- $name = printf "%s-%s" $name (include "kvguard.name" .) -}}{{- end -}}
{{/* A release may be called qwen2.5, and a Service may not. */}}
{{- $name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* A number as digits: values come as floating point, and a large one would be written 1e+09. */}}
{{- define "kvguard.number" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) -}}{{- int64 . -}}{{- else -}}{{- . -}}{{- end -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change in the life of a release: selectors. Takes {root, component}. */}}
{{- define "kvguard.selector" -}}
app.kubernetes.io/name: {{ include "kvguard.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvguard.labels" -}}
{{ include "kvguard.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | replace "+" "_" | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | trimSuffix "_" | trimSuffix "." }}
{{- end -}}

{{/* A reference to an image: {image, tag}, a digest before a tag. */}}
{{- define "kvguard.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default (.tag | replace "+" "_") .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* IP families, the same for every Service. */}}
{{- define "kvguard.families" -}}
{{- with .Values.service.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.service.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "kvguard.serviceAccount" -}}
{{- default (include "kvguard.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{/* "yes" when the cluster knows a kind that an operator brings: {root, api, kind}. */}}
{{- define "kvguard.has" -}}
{{- if .root.Capabilities.APIVersions.Has (printf "%s/%s" .api .kind) -}}yes{{- end -}}
{{- end -}}

{{/* "yes" when this is a group of nodes. */}}
{{- define "kvguard.isGroup" -}}
{{- if .Values.multiNode.enabled -}}yes{{- end -}}
{{- end -}}

{{/* All nodes of all groups. */}}
{{- define "kvguard.groupSelector" -}}
matchLabels:
  app.kubernetes.io/name: {{ include "kvguard.name" . | quote }}
  app.kubernetes.io/instance: {{ .Release.Name | quote }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [engine, worker]}
{{- end -}}

{{- define "kvguard.hasGroups" -}}
{{- include "kvguard.has" (dict "root" . "api" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet") -}}
{{- end -}}

{{/* The LeaderWorkerSet: its controller makes a headless Service of the same name, so it is not that of our Service. */}}
{{- define "kvguard.groupName" -}}
{{- printf "%s-group" (include "kvguard.fullname" .) -}}
{{- end -}}

{{/* What runs the engines, as autoscalers name it. */}}
{{- define "kvguard.target" -}}
{{- if include "kvguard.isGroup" . -}}
{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ include "kvguard.groupName" . }}}
{{- else -}}
{apiVersion: apps/v1, kind: Deployment, name: {{ include "kvguard.fullname" . }}}
{{- end -}}
{{- end -}}

{{/*
The folder of calibrated scales: its name, and a digest of what they were measured on. Where the Job runs is no part of it.
*/}}
{{- define "kvguard.scales" -}}
{{- $v := .Values -}}
{{- $model := dict "source" $v.model.source "name" $v.model.name "revision" $v.model.revision "claim" $v.model.pvc.claim "image" $v.model.image.reference -}}
{{- $engine := include "kvguard.image" (dict "image" $v.engine.image "tag" "latest") -}}
{{- $measured := dict "model" $model "engine" $engine "args" $v.engine.args "options" $v.calibration.extraArgs -}}
{{- printf "/scales/%s-%s" $v.calibration.name ($measured | toJson | sha256sum | trunc 8) -}}
{{- end -}}

{{- define "kvguard.hasKeda" -}}
{{- include "kvguard.has" (dict "root" . "api" "keda.sh/v1alpha1" "kind" "ScaledObject") -}}
{{- end -}}

{{- define "kvguard.isScaled" -}}
{{- if or (eq .Values.autoscaling.kind "hpa") (and (eq .Values.autoscaling.kind "keda") (include "kvguard.hasKeda" .)) -}}yes{{- end -}}
{{- end -}}

{{/*
How many engines. An autoscaler owns the number. It is not said on an install, nor where Helm applies on the server and somebody has
scaled: there the field stays when Helm lets go of it, and a number that is said would be a conflict after a rollback. Elsewhere the live one
is said again, because a field that is left out after it was there is reset to 1. `helm template` sees no cluster and says nothing.
*/}}
{{- define "kvguard.replicas" -}}
{{- if include "kvguard.isScaled" . -}}
{{- $target := include "kvguard.target" . | fromYaml -}}
{{- $live := lookup $target.apiVersion $target.kind .Release.Namespace $target.name -}}
{{- $applied := false -}}
{{- $scaled := false -}}
{{- range dig "metadata" "managedFields" (list) $live -}}
{{- if eq (get . "operation") "Apply" -}}{{- $applied = true -}}{{- end -}}
{{- if eq (get . "subresource" | toString) "scale" -}}{{- $scaled = true -}}{{- end -}}
{{- end -}}
{{- if and (hasKey (get $live "spec" | default dict) "replicas") (not (and $applied $scaled)) -}}{{ int $live.spec.replicas }}{{- end -}}
{{- else -}}
{{ include "kvguard.number" .Values.replicas }}
{{- end -}}
{{- end -}}

{{/* Seconds in which one pod may go and the next come. */}}
{{- define "kvguard.progress" -}}
{{- add (int .Values.drain.preStop) (int .Values.drain.grace) (int .Values.startup.timeout) 600 -}}
{{- end -}}

{{/* What values.schema.json cannot say. Every message names the value. */}}
{{- define "kvguard.validate" -}}
{{- $v := .Values -}}
{{- include "kvguard.validateNames" . -}}
{{- include "kvguard.validateSelector" . -}}
{{- include "kvguard.validatePolicy" . -}}
{{- include "kvguard.validatePod" . -}}
{{- if eq $v.mode "sidecar" -}}
{{- if ne $v.shadow.mode "off" -}}
{{- fail (printf "shadow.mode: %s needs mode: wrapper; `kvguard attach` does not probe" $v.shadow.mode) -}}
{{- end -}}
{{- if $v.calibration.enabled -}}
{{- fail "calibration.enabled: needs mode: wrapper; `kvguard attach` does not choose what the engine loads" -}}
{{- end -}}
{{- end -}}
{{- if and $v.multiNode.enabled (ne $v.mode "sidecar") -}}
{{- fail (printf "multiNode.enabled: needs mode: sidecar, found mode: %s; `kvguard serve` reads the tensors of one node, and ranks on others would go unproven" $v.mode) -}}
{{- end -}}
{{- if and $v.multiNode.enabled (lt (int $v.engine.gpus) 1) -}}
{{- fail "engine.gpus: multiNode.enabled needs at least 1 for each node" -}}
{{- end -}}
{{- if and (eq $v.model.source "hub") (not $v.model.name) -}}
{{- fail "model.name: required, the model's name on the hub, for example --set model.name=Qwen/Qwen3-8B" -}}
{{- end -}}
{{- if and (ne $v.model.source "hub") (hasPrefix "/" $v.model.name) -}}
{{- fail (printf "model.name: with model.source=%s it is a path inside the volume, such as llama-3; found %q" $v.model.source $v.model.name) -}}
{{- end -}}
{{- if contains ".." $v.model.name -}}
{{- fail (printf "model.name: %q must not contain .." $v.model.name) -}}
{{- end -}}
{{- if and (eq $v.model.source "pvc") (not $v.model.pvc.claim) -}}
{{- fail "model.pvc.claim: required with model.source=pvc, the claim that holds the model" -}}
{{- end -}}
{{- if and (eq $v.model.source "image") (not $v.model.image.reference) -}}
{{- fail "model.image.reference: required with model.source=image, the image that holds the model" -}}
{{- end -}}
{{- if and $v.calibration.enabled (not $v.calibration.claim) -}}
{{- fail "calibration.claim: required with calibration.enabled, a claim that the Job and all replicas can mount" -}}
{{- end -}}
{{- if and $v.calibration.enabled (eq $v.model.source "hub") (not $v.model.cache.claim) -}}
{{- fail "model.cache.claim: required with calibration.enabled and model.source=hub, so that the Job and the replicas read the same files" -}}
{{- end -}}
{{- if ge (int $v.drain.settle) (sub (int $v.drain.grace) 4) -}}
{{- fail (printf "drain.settle: %d s leave nothing of drain.grace (%d s, of which 4 stop the engine); requests need what is between" (int $v.drain.settle) (int $v.drain.grace)) -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas: %d is above autoscaling.maxReplicas, %d" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.prometheus) -}}
{{- fail "autoscaling.prometheus: required with autoscaling.kind=keda, the address of Prometheus" -}}
{{- end -}}
{{- if and (eq $v.autoscaling.kind "keda") (eq $v.monitor.kind "none") -}}
{{- fail "monitor.kind: autoscaling.kind=keda reads metrics that Prometheus must scrape; use PodMonitor or ServiceMonitor" -}}
{{- end -}}
{{- if or $v.calibration.enabled (eq $v.shadow.mode "reference") -}}
{{- range $argument := $v.engine.args -}}
{{- if or (hasPrefix "--kv-cache-dtype" $argument) (hasPrefix "--calculate-kv-scales" $argument) -}}
{{- fail (printf "engine.args: %s would also reach the 16-bit engine of shadow.mode=reference or of calibration; leave the KV cache to policy.kv_cache" $argument) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $set := list "--host" "--port" "--uds" -}}
{{- if $v.multiNode.enabled -}}
{{- $set = concat $set (list "--nnodes" "-n" "--node-rank" "-r" "--master-addr" "--master-port" "--headless" "--tensor-parallel-size" "-tp" "--pipeline-parallel-size" "-pp") -}}
{{- end -}}
{{- range $flag := $set -}}
{{- range $argument := concat $v.engine.args $v.shadow.reference.args -}}
{{- if or (eq $argument $flag) (hasPrefix (printf "%s=" $flag) $argument) -}}
{{- fail (printf "engine.args: %s is set by the chart" $flag) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
