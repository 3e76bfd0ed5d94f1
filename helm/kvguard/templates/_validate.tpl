{{/*
`helm upgrade --reuse-values` takes the values of the release's chart in place of this one's defaults, and keys that are new here are missing.
Looked for before anything reads them: Helm renders the deepest template first, which includes this.
*/}}
{{- define "kvguard.validateKeys" -}}
{{- $values := .Values -}}
{{- range $path := .Files.Lines "files/keys.txt" -}}
{{- if $path -}}
{{- $at := $values -}}
{{- $there := true -}}
{{- range $key := splitList "." $path -}}
{{- if and $there (kindIs "map" $at) (hasKey $at $key) -}}{{- $at = get $at $key -}}{{- else -}}{{- $there = false -}}{{- end -}}
{{- end -}}
{{- if not $there -}}
{{- fail (printf "%s: missing among the values, and this chart has a default for it; with `helm upgrade`, say --reset-then-reuse-values in place of --reuse-values" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a live Deployment cannot be changed to. */}}
{{- define "kvguard.validateSelector" -}}
{{- if not (include "kvguard.isGroup" .) -}}
{{- $name := include "kvguard.fullname" . -}}
{{- $live := lookup "apps/v1" "Deployment" .Release.Namespace $name -}}
{{- if $live -}}
{{- $found := $live.spec.selector.matchLabels -}}
{{- $wanted := include "kvguard.selector" (dict "root" . "component" "engine") | fromYaml -}}
{{- if ne (toJson $found) (toJson $wanted) -}}
{{- fail (printf "nameOverride: the Deployment %s selects pods by %s, which cannot be changed to %s; keep nameOverride as it was, or `kubectl delete deployment %s` before the upgrade, which stops its engines" $name (toJson $found) (toJson $wanted) $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names that become names of Services and accounts. */}}
{{- define "kvguard.validateNames" -}}
{{- $v := .Values -}}
{{- $name := include "kvguard.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride: Services would be called %q; a letter, then lower-case letters, digits and hyphens (from fullnameOverride, or the release's name %q and nameOverride)" $name .Release.Name) -}}
{{- end -}}
{{- if has $name (list "true" "false" "yes" "no" "on" "off" "y" "n" "null") -}}
{{- fail (printf "fullnameOverride: %q is a word of YAML's own; choose another name" $name) -}}
{{- end -}}
{{- with $v.nameOverride -}}
{{- if not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" .) -}}
{{- fail (printf "nameOverride: %q cannot be the value of a label; letters, digits, hyphens, dots, begun and ended by a letter or a digit" .) -}}
{{- end -}}
{{- end -}}
{{- with $v.serviceAccount.name -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$" .) -}}
{{- fail (printf "serviceAccount.name: %q is no name of a ServiceAccount; lower-case letters, digits, hyphens and dots" .) -}}
{{- end -}}
{{- end -}}
{{- if not (or $v.engine.image.tag $v.engine.image.digest) -}}
{{- fail "engine.image.tag: required where there is no engine.image.digest; the policy is judged for one version of vLLM" -}}
{{- end -}}
{{- end -}}

{{/* What no engine in this mode can show. */}}
{{- define "kvguard.validatePolicy" -}}
{{- $v := .Values -}}
{{- $cache := $v.policy.kv_cache | default dict -}}
{{- $scales := get $cache "scales" -}}
{{- if eq $v.mode "sidecar" -}}
{{- if eq (get $cache "min_confidence" | toString) "proven" -}}
{{- fail "policy.kv_cache.min_confidence: proven needs mode: wrapper; `kvguard attach` does not read the cache tensors and shows corroborated at most" -}}
{{- end -}}
{{- if eq (toString $scales) "runtime" -}}
{{- fail "policy.kv_cache.scales: runtime needs mode: wrapper; `kvguard attach` does not choose what the engine loads" -}}
{{- end -}}
{{- end -}}
{{- if and $v.calibration.enabled (eq (toString $scales) "unit") -}}
{{- fail "policy.kv_cache.scales: unit contradicts calibration.enabled, which starts the replicas on measured scales; require runtime" -}}
{{- end -}}
{{- $static := has (get $cache "dtype" | toString) (list "fp8" "fp8_e4m3" "fp8_e5m2") -}}
{{- if and $static (eq $v.mode "wrapper") (eq (toString $scales) "runtime") (not $v.calibration.enabled) (not $v.cache.claim) -}}
{{- $way := false -}}
{{- range $argument := concat $v.engine.args $v.kvguard.extraArgs -}}
{{- if or (hasPrefix "--calculate-kv-scales" $argument) (hasPrefix "--scales" $argument) (eq "--calibrate" $argument) -}}
{{- $way = true -}}
{{- end -}}
{{- end -}}
{{- if not $way -}}
{{- fail "policy.kv_cache.scales: runtime, and nothing measures them: set calibration.enabled, or kvguard.extraArgs (--calibrate, --scales), or cache.claim with a calibration in it, or --calculate-kv-scales in engine.args where that vLLM has it" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What would stand twice in one pod. */}}
{{- define "kvguard.validatePod" -}}
{{- $v := .Values -}}
{{- if and (has "IPv6" $v.service.ipFamilies) (ne $v.listenHost "::") -}}
{{- fail (printf "listenHost: service.ipFamilies has IPv6, and on %s kvguard listens on IPv4 only; set listenHost to ::" $v.listenHost) -}}
{{- end -}}
{{- $ports := dict "8000" "the API" -}}
{{- if eq $v.mode "sidecar" -}}{{- $_ := set $ports "8001" "the engine beside kvguard" -}}{{- end -}}
{{- with get $ports (toString (int $v.management.port)) -}}
{{- fail (printf "management.port: %d is the port of %s" (int $v.management.port) .) -}}
{{- end -}}
{{- if $v.multiNode.enabled -}}
{{- $_ := set $ports (toString (int $v.management.port)) "management.port" -}}
{{- with get $ports (toString (int $v.multiNode.masterPort)) -}}
{{- fail (printf "multiNode.masterPort: %d is the port of %s" (int $v.multiNode.masterPort) .) -}}
{{- end -}}
{{- end -}}
{{- $labels := include "kvguard.selector" (dict "root" . "component" "engine") | fromYaml -}}
{{- range $name, $_ := $v.podLabels -}}
{{- if hasKey $labels $name -}}
{{- fail (printf "podLabels: %s is set by the chart; Services and Deployments select pods by such labels" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := $v.podAnnotations -}}
{{- if has $name (list "kubectl.kubernetes.io/default-container" "kvguard.dev/policy-checksum") -}}
{{- fail (printf "podAnnotations: %s is set by the chart" $name) -}}
{{- end -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $v.env -}}
{{- if hasKey $seen .name -}}{{- fail (printf "env: %s is given twice" .name) -}}{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- $volumes := dict "policy" true -}}
{{- $paths := dict "/etc/kvguard" true -}}
{{- if and $v.kvguard.rememberRefusals (eq $v.mode "wrapper") -}}
{{- $_ := set $volumes "refusals" true -}}{{- $_ := set $paths "/var/lib/kvguard-refusals" true -}}
{{- end -}}
{{- if $v.calibration.enabled -}}
{{- $_ := set $volumes "scales" true -}}{{- $_ := set $paths "/scales" true -}}
{{- end -}}
{{- range include "kvguard.volumes" . | fromYamlArray -}}{{- $_ := set $volumes .name true -}}{{- end -}}
{{- range $v.volumes -}}
{{- if hasKey $volumes .name -}}{{- fail (printf "volumes: there is a volume %s already; choose another name" .name) -}}{{- end -}}
{{- $_ := set $volumes .name true -}}
{{- end -}}
{{- range include "kvguard.mounts" . | fromYamlArray -}}{{- $_ := set $paths .mountPath true -}}{{- end -}}
{{- range $v.volumeMounts -}}
{{- $path := .mountPath | trimSuffix "/" -}}
{{- if hasKey $paths $path -}}{{- fail (printf "volumeMounts: something is mounted at %s already" .mountPath) -}}{{- end -}}
{{- $_ := set $paths $path true -}}
{{- end -}}
{{- range $argument := concat $v.engine.args $v.shadow.reference.args -}}
{{- if or (eq $argument "--api-key") (hasPrefix "--api-key=" $argument) -}}
{{- fail "engine.args: --api-key would stand in the pod's spec and in kvguard's record of the command; use engine.apiKeySecret" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Variables of the engine's container, the chart's and then the user's, which win: {root, own} with `own` as YAML. */}}
{{- define "kvguard.variables" -}}
{{- $given := list -}}
{{- range .root.Values.env -}}{{- $given = append $given .name -}}{{- end -}}
{{- $all := list -}}
{{- range .own | fromYamlArray -}}
{{- if not (has .name $given) -}}{{- $all = append $all . -}}{{- end -}}
{{- end -}}
{{- concat $all .root.Values.env | toYaml -}}
{{- end -}}
