{{/* "yes" when kvguard is copied into the engine's container. */}}
{{- define "kvguard.copied" -}}
{{- if and (eq .Values.mode "wrapper") (eq .Values.kvguard.delivery "copy") -}}yes{{- end -}}
{{- end -}}

{{/* The model as the engine's command names it. */}}
{{- define "kvguard.model" -}}
{{- if and (eq .Values.model.source "hub") .Values.model.revision -}}
{{- printf "/model/hub/models--%s/snapshots/%s" (.Values.model.name | replace "/" "--") .Values.model.revision -}}
{{- else if eq .Values.model.source "hub" -}}
{{- .Values.model.name -}}
{{- else -}}
{{- printf "/model/%s" .Values.model.name | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* How kvguard is started, as a list. */}}
{{- define "kvguard.command" -}}
- {{ .Values.engine.python }}
- -I
- -S
- /opt/kvguard
{{- end -}}

{{- define "kvguard.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvguard.environment" -}}
# Engines look up a home and a user name, and this user has neither in the image.
- {name: HOME, value: /var/cache/kvguard}
- {name: USER, value: kvguard}
- {name: XDG_CACHE_HOME, value: /var/cache/kvguard}
- {name: XDG_STATE_HOME, value: /var/lib/kvguard}
- {name: KVGUARD_RUN_DIR, value: /run/kvguard/private}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: PYTHONDONTWRITEBYTECODE, value: "1"}
{{- if eq .Values.model.source "hub" }}
- {name: HF_HOME, value: /model}
# HF_HOME is read-only here, and code that comes with a model (--trust-remote-code) is copied before it is run.
- {name: HF_MODULES_CACHE, value: /var/cache/kvguard/huggingface-modules}
{{- end }}
{{- end -}}

{{- define "kvguard.mounts" -}}
- {name: cache, mountPath: /var/cache/kvguard}
- {name: records, mountPath: /var/lib/kvguard}
- {name: run, mountPath: /run/kvguard}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
- {name: model, mountPath: /model, readOnly: true}
{{- if include "kvguard.copied" . }}
- {name: kvguard, mountPath: /opt/kvguard, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvguard.initContainers" -}}
{{- if include "kvguard.copied" . }}
- name: kvguard
  image: {{ include "kvguard.image" (dict "image" .Values.kvguard.image "tag" .Chart.AppVersion) }}
  imagePullPolicy: {{ .Values.kvguard.image.pullPolicy }}
  # -f: a container that is run again finds its own files there.
  command: [cp, -Rf, /opt/kvguard/., /target]
  securityContext: {{- include "kvguard.containerSecurity" . | nindent 4 }}
  resources: {{- toYaml .Values.helperResources | nindent 4 }}
  volumeMounts:
    - {name: kvguard, mountPath: /target}
{{- end }}
{{- if eq .Values.model.source "hub" }}
- name: model
  image: {{ include "kvguard.image" (dict "image" .Values.engine.image "tag" "latest") }}
  imagePullPolicy: {{ .Values.engine.image.pullPolicy }}
  # huggingface_hub is part of the engine's image; kvguard and the engine then read the files offline.
  command:
    - {{ .Values.engine.python }}
    - -c
    - {{ .Files.Get "files/download.py" | quote }}
    - {{ .Values.model.name | quote }}
    {{- with .Values.model.revision }}
    - {{ . | quote }}
    {{- end }}
  env:
    - {name: HF_HOME, value: /model}
    - {name: HOME, value: /tmp}
    {{- with .Values.model.tokenSecret }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
    {{- end }}
    {{- end }}
  securityContext: {{- include "kvguard.containerSecurity" . | nindent 4 }}
  resources: {{- toYaml .Values.model.downloadResources | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /model}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}

{{- define "kvguard.claimOrEmpty" -}}
{{- if .claim }}
- name: {{ .name }}
  persistentVolumeClaim: {claimName: {{ .claim | quote }}}
{{- else }}
- name: {{ .name }}
  emptyDir: {{- if .size }} {sizeLimit: {{ .size }}}{{ else }} {}{{ end }}
{{- end }}
{{- end -}}

{{- define "kvguard.volumes" -}}
{{- include "kvguard.claimOrEmpty" (dict "name" "cache" "claim" .Values.cache.claim "size" .Values.cache.size) }}
{{- include "kvguard.claimOrEmpty" (dict "name" "records" "claim" .Values.records.claim "size" "1Gi") }}
# The engine's socket and its secret: never on a disk.
- name: run
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.sharedMemory }}}
{{- if include "kvguard.copied" . }}
- name: kvguard
  emptyDir: {sizeLimit: 1Gi}
{{- end }}
{{- if eq .Values.model.source "hub" }}
{{- include "kvguard.claimOrEmpty" (dict "name" "model" "claim" .Values.model.cache.claim "size" .Values.model.cache.size) }}
{{- else if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.pvc.claim | quote }}, readOnly: true}
{{- else }}
- name: model
  image: {reference: {{ .Values.model.image.reference | quote }}, pullPolicy: {{ .Values.model.image.pullPolicy }}}
{{- end }}
{{- end -}}

{{/* Resources with GPUs: {root, gpus}. */}}
{{- define "kvguard.resources" -}}
{{- $resources := deepCopy .root.Values.engine.resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .root.Values.engine.gpuResource (toString (int .gpus)))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Settings of a pod that every workload shares: {root, component}. */}}
{{- define "kvguard.podSettings" -}}
{{- $v := .root.Values -}}
serviceAccountName: {{ include "kvguard.serviceAccount" .root | quote }}
automountServiceAccountToken: false
# A Service named vllm would set VLLM_PORT for every pod beside it, which vLLM takes for its own setting.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ include "kvguard.number" $v.runAsUser }}
  runAsGroup: {{ include "kvguard.number" $v.runAsUser }}
  fsGroup: {{ include "kvguard.number" $v.runAsUser }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $v.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.topologySpreadConstraints }}
topologySpreadConstraints:
{{- range . }}
  - {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" (include "kvguard.selector" $ | fromYaml)))) | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The engine's command: {root, args, gpus, listen}. */}}
{{- define "kvguard.vllm" -}}
{{- $v := .root.Values -}}
- vllm
- serve
- {{ include "kvguard.model" .root | quote }}
{{- range .listen }}
- {{ . | quote }}
{{- end }}
{{- if or $v.model.servedName $v.model.revision (ne $v.model.source "hub") }}
- --served-model-name
- {{ default $v.model.name $v.model.servedName | default (include "kvguard.fullname" .root) | quote }}
{{- end }}
{{- if include "kvguard.isGroup" .root }}
{{- include "kvguard.groupFlags" . }}
{{- else if gt (int .gpus) 1 }}
- --tensor-parallel-size
- {{ .gpus | quote }}
{{- end }}
{{- range .args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Flags of one node of a group: {root, gpus, worker}. LeaderWorkerSet sets the variables. */}}
{{- define "kvguard.groupFlags" -}}
{{- $v := .root.Values -}}
{{- $tensor := int .gpus -}}
{{- if eq $v.multiNode.parallelism "tensor" }}{{ $tensor = mul $tensor (int $v.multiNode.size) }}{{ end }}
{{- if gt (int $tensor) 1 }}
- --tensor-parallel-size
- {{ $tensor | quote }}
{{- end }}
{{- if eq $v.multiNode.parallelism "pipeline" }}
- --pipeline-parallel-size
- {{ $v.multiNode.size | quote }}
{{- end }}
- --nnodes
- {{ $v.multiNode.size | quote }}
- --node-rank
- {{ ternary "$(LWS_WORKER_INDEX)" "0" (default false .worker) | quote }}
- --master-addr
- $(LWS_LEADER_ADDRESS)
- --master-port
- {{ $v.multiNode.masterPort | quote }}
{{- if .worker }}
- --headless
{{- end }}
{{- end -}}

{{/* The address that a node tells the others. */}}
{{- define "kvguard.groupEnvironment" -}}
{{- if include "kvguard.isGroup" . }}
- name: VLLM_HOST_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end }}
{{- end -}}

{{/* Options that `serve` and `attach` share. */}}
{{- define "kvguard.options" -}}
{{- $v := .root.Values -}}
- --policy
- /etc/kvguard/{{ .policy }}
- --management-port
- {{ $v.management.port | quote }}
- --start-timeout
- {{ $v.startup.timeout | quote }}
- --settle
- {{ $v.drain.settle | quote }}
- --grace
- {{ $v.drain.grace | quote }}
{{- if $v.kvguard.logJson }}
- --log-json
{{- end }}
{{- end -}}

{{/* The key that clients send and the engine asks for. */}}
{{- define "kvguard.apiKey" -}}
{{- with .root.Values.engine.apiKeySecret }}
{{- if and $.apiKey .name }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Ports and probes of the container that clients talk to. */}}
{{- define "kvguard.facing" -}}
{{- $v := .root.Values -}}
ports:
  - {name: api, containerPort: 8000}
  - {name: management, containerPort: {{ $v.management.port }}}
# Alive, not ready: a pod that holds after a refusal stays up to be read. How long the engine may take is
# --start-timeout; this is the time kvguard has to open its port.
startupProbe:
  httpGet: {path: /livez, port: management}
  periodSeconds: 5
  failureThreshold: {{ div (add (int $v.startup.timeout) 4) 5 }}
livenessProbe:
  httpGet: {path: /livez, port: management}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: management}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 1
{{- if gt (int $v.drain.preStop) 0 }}
lifecycle:
  preStop:
    sleep: {seconds: {{ $v.drain.preStop }}}
{{- end }}
terminationMessagePath: /dev/termination-log
terminationMessagePolicy: File
{{- end -}}

{{/*
The sidecar mode's two containers. The engine is a sidecar in Kubernetes' sense, an init container that goes on: it is started
before kvguard, restarted by itself, and stopped after kvguard has drained. It listens on the pod's loopback only; a Unix socket
would outlive a restart of its container, and vLLM does not start on a socket that is there.
*/}}
{{- define "kvguard.engineSidecar" -}}
{{- $v := .root.Values -}}
- name: vllm
  image: {{ include "kvguard.image" (dict "image" $v.engine.image "tag" "latest") }}
  imagePullPolicy: {{ $v.engine.image.pullPolicy }}
  restartPolicy: Always
  command: {{- include "kvguard.vllm" (merge (dict "listen" (list "--host" "127.0.0.1" "--port" "8001")) .) | nindent 4 }}
  env: {{- include "kvguard.variables" (dict "root" .root "own" (printf "%s\n%s\n%s" (include "kvguard.environment" .root) (include "kvguard.groupEnvironment" .root) (include "kvguard.apiKey" .))) | nindent 4 }}
  {{- with $v.envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- include "kvguard.containerSecurity" .root | nindent 4 }}
  resources: {{- include "kvguard.resources" . | nindent 4 }}
  volumeMounts:
    {{- include "kvguard.mounts" .root | nindent 4 }}
    {{- with $v.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* A pod of a group that serves nothing: one more node's ranks. {root, component, args, gpus, apiKey, worker}. */}}
{{- define "kvguard.workerPod" -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "kvguard.selector" . | nindent 4 }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $v.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "kvguard.podSettings" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ add (int $v.drain.preStop) (int $v.drain.grace) 20 }}
  {{- with trim (include "kvguard.initContainers" .root) }}
  initContainers: {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: vllm
      image: {{ include "kvguard.image" (dict "image" $v.engine.image "tag" "latest") }}
      imagePullPolicy: {{ $v.engine.image.pullPolicy }}
      command: {{- include "kvguard.vllm" (merge (dict "listen" list) .) | nindent 8 }}
      env: {{- include "kvguard.variables" (dict "root" .root "own" (printf "%s\n%s" (include "kvguard.environment" .root) (include "kvguard.groupEnvironment" .root))) | nindent 8 }}
      {{- with $v.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext: {{- include "kvguard.containerSecurity" .root | nindent 8 }}
      resources: {{- include "kvguard.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "kvguard.mounts" .root | nindent 8 }}
        {{- with $v.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "kvguard.volumes" .root | nindent 4 }}
    {{- with $v.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "kvguard.attached" -}}
{{- $v := .root.Values -}}
- name: kvguard
  image: {{ include "kvguard.image" (dict "image" $v.kvguard.image "tag" .root.Chart.AppVersion) }}
  imagePullPolicy: {{ $v.kvguard.image.pullPolicy }}
  command: [python3, -I, -S, /opt/kvguard]
  args:
    - attach
    - --engine
    - http://127.0.0.1:8001
    - --host
    - {{ $v.listenHost | quote }}
    {{- include "kvguard.options" . | nindent 4 }}
    {{- with $v.sidecar.kvBytes }}
    - --kv-bytes
    - {{ . | quote }}
    {{- end }}
    {{- range $v.kvguard.extraArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- include "kvguard.environment" .root | nindent 4 }}
    {{- include "kvguard.apiKey" . | nindent 4 }}
  {{- include "kvguard.facing" . | nindent 2 }}
  securityContext: {{- include "kvguard.containerSecurity" .root | nindent 4 }}
  resources: {{- toYaml $v.sidecar.resources | nindent 4 }}
  volumeMounts:
    - {name: cache, mountPath: /var/cache/kvguard}
    - {name: records, mountPath: /var/lib/kvguard}
    - {name: run, mountPath: /run/kvguard}
    - {name: tmp, mountPath: /tmp}
    - {name: model, mountPath: /model, readOnly: true}
    - {name: policy, mountPath: /etc/kvguard, readOnly: true}
{{- end -}}

{{/*
A pod that serves behind kvguard: {root, component, args, gpus, shadow, apiKey, policy, scales}. `args` are vLLM's flags, `shadow`
kvguard's options for probes, `policy` the key in the ConfigMap.
*/}}
{{- define "kvguard.servingPod" -}}
{{- $root := .root -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "kvguard.selector" . | nindent 4 }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ ternary "kvguard" "vllm" (eq $v.mode "sidecar") }}
    # A new policy rolls the pods that it is for: it is judged when an engine starts. A new chart alone does not.
    kvguard.dev/policy-checksum: {{ get (include "kvguard.policies" $root | fromYaml) .policy | sha256sum }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "kvguard.podSettings" . | nindent 2 }}
  # preStop, then kvguard's own grace, then a margin in which the kubelet need not kill; a sidecar stops only after that.
  terminationGracePeriodSeconds: {{ add (int $v.drain.preStop) (int $v.drain.grace) (ternary 20 5 (eq $v.mode "sidecar")) }}
  {{- $before := include "kvguard.initContainers" $root }}
  {{- if and .scales $v.calibration.enabled }}
  {{- $before = printf "%s\n%s" $before (include (ternary "kvguard.measure" "kvguard.waitForScales" (eq $v.calibration.by "replica")) $root) }}
  {{- end }}
  {{- if eq $v.mode "sidecar" }}
  {{- $before = printf "%s\n%s" $before (include "kvguard.engineSidecar" .) }}
  {{- end }}
  {{- with trim $before }}
  initContainers: {{- . | nindent 4 }}
  {{- end }}
  containers:
    {{- if eq $v.mode "sidecar" }}
    {{- include "kvguard.attached" . | nindent 4 }}
    {{- else }}
    - name: vllm
      image: {{ include "kvguard.image" (dict "image" $v.engine.image "tag" "latest") }}
      imagePullPolicy: {{ $v.engine.image.pullPolicy }}
      command: {{- include "kvguard.command" $root | nindent 8 }}
      args:
        - serve
        {{- include "kvguard.options" . | nindent 8 }}
        {{- if $v.kvguard.rememberRefusals }}
        - --refusals
        - /var/lib/kvguard-refusals
        {{- end }}
        {{- range .shadow }}
        - {{ . | quote }}
        {{- end }}
        {{- if and .scales $v.calibration.enabled }}
        - --scales
        - {{ include "kvguard.scales" $root }}
        {{- end }}
        {{- range $v.kvguard.extraArgs }}
        - {{ . | quote }}
        {{- end }}
        - --
        {{- include "kvguard.vllm" (merge (dict "listen" (list "--host" $v.listenHost "--port" "8000")) .) | nindent 8 }}
      env: {{- include "kvguard.variables" (dict "root" $root "own" (printf "%s\n%s" (include "kvguard.environment" $root) (include "kvguard.apiKey" .))) | nindent 8 }}
      {{- with $v.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- include "kvguard.facing" . | nindent 6 }}
      securityContext: {{- include "kvguard.containerSecurity" $root | nindent 8 }}
      resources: {{- include "kvguard.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "kvguard.mounts" $root | nindent 8 }}
        - {name: policy, mountPath: /etc/kvguard, readOnly: true}
        {{- if $v.kvguard.rememberRefusals }}
        - {name: refusals, mountPath: /var/lib/kvguard-refusals}
        {{- end }}
        {{- if and .scales $v.calibration.enabled }}
        - {name: scales, mountPath: /scales, readOnly: true}
        {{- end }}
        {{- with $v.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- end }}
  volumes:
    {{- include "kvguard.volumes" $root | nindent 4 }}
    - name: policy
      configMap: {name: {{ include "kvguard.fullname" $root }}-policy}
    {{- if and $v.kvguard.rememberRefusals (eq $v.mode "wrapper") }}
    # It outlives the container and not the pod: another node, or another GPU, is another question.
    - name: refusals
      emptyDir: {sizeLimit: 16Mi}
    {{- end }}
    {{- if and .scales $v.calibration.enabled }}
    - name: scales
      persistentVolumeClaim: {claimName: {{ $v.calibration.claim | quote }}{{ if eq $v.calibration.by "job" }}, readOnly: true{{ end }}}
    {{- end }}
    {{- with $v.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Waits for the calibration Job's artefact. */}}
{{- define "kvguard.waitForScales" -}}
- name: scales
  image: {{ include "kvguard.image" (dict "image" .Values.engine.image "tag" "latest") }}
  imagePullPolicy: {{ .Values.engine.image.pullPolicy }}
  command:
    - {{ .Values.engine.python }}
    - -c
    - {{ .Files.Get "files/wait.py" | quote }}
    - {{ include "kvguard.scales" . }}
    - {{ .Values.startup.timeout | quote }}
  securityContext: {{- include "kvguard.containerSecurity" . | nindent 4 }}
  resources: {{- toYaml .Values.helperResources | nindent 4 }}
  volumeMounts:
    - {name: scales, mountPath: /scales, readOnly: true}
{{- end -}}
