{{/* The name of the release's objects; the longest suffix is "-0" of a pod and a revision's hash. */}}
{{- define "roundhouse.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "roundhouse.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "roundhouse.labels" -}}
{{ include "roundhouse.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "roundhouse.keySecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-key" (include "roundhouse.name" .)) -}}
{{- end -}}

{{/* The time for turns in flight, then the longest time for any model's engine to stop. */}}
{{- define "roundhouse.drainSeconds" -}}
{{- $server := .Values.config.server | default dict -}}
{{- hasKey $server "drain_s" | ternary $server.drain_s 30 | ceil | int -}}
{{- end -}}

{{- define "roundhouse.stopSeconds" -}}
{{- $longest := 10 -}}
{{- range .Values.config.models -}}
{{- $timeouts := .timeouts | default dict -}}
{{- $longest = max $longest ($timeouts.stop_grace_s | default 10 | ceil | int) -}}
{{- end -}}
{{- $longest -}}
{{- end -}}

{{/* The container's configuration: the values' config, with settings that only the chart knows. */}}
{{- define "roundhouse.config" -}}
{{- $name := include "roundhouse.name" . -}}
{{- $config := deepCopy .Values.config -}}
{{- if not $config.models -}}
{{- $_ := set $config "models" (dict "tiny" (dict "engine" "embedded" "slots" 4)) -}}
{{- end -}}
{{- $server := $config.server | default dict -}}
{{- $svc := printf "%s.%s" $name .Release.Namespace -}}
{{- $own := list $name $svc (printf "%s.svc" $svc) (printf "%s.svc.cluster.local" $svc) -}}
{{- $hosts := concat $own ($server.hosts | default list) | uniq -}}
{{- $server = mergeOverwrite $server (dict "host" "0.0.0.0" "port" 8080 "hosts" $hosts) -}}
{{- $config = mergeOverwrite $config (dict "server" $server) -}}
{{- if .Values.postgresql.existingSecret -}}
{{- $store := mergeOverwrite ($config.store | default dict) (dict "url" "${ROUNDHOUSE_STORE_URL}") -}}
{{- $config = mergeOverwrite $config (dict "store" $store) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Checks for values that are valid alone but not together. */}}
{{- define "roundhouse.check" -}}
{{- $shared := .Values.postgresql.existingSecret -}}
{{- if and (gt (int .Values.replicas) 1) (not $shared) -}}
{{- fail "replicas: more than one node needs postgresql.existingSecret, a Secret with the database's URL" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (not $shared) -}}
{{- fail "autoscaling.enabled: more than one node needs postgresql.existingSecret, a Secret with the database's URL" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling: minReplicas is more than maxReplicas" -}}
{{- end -}}
{{- if .Values.groups.size -}}
{{- if mod (int .Values.replicas) (int .Values.groups.size) -}}
{{- fail "replicas: not a multiple of groups.size" -}}
{{- end -}}
{{- if not $shared -}}
{{- fail "groups.size: groups of nodes need postgresql.existingSecret, a Secret with the database's URL" -}}
{{- end -}}
{{- if .Values.autoscaling.enabled -}}
{{- fail "autoscaling.enabled: groups of nodes are not scaled" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The pod of a node, of a StatefulSet or a LeaderWorkerSet. */}}
{{- define "roundhouse.pod" -}}
metadata:
  labels:
    {{- include "roundhouse.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "roundhouse.config" . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ .Values.serviceAccountName }}
  automountServiceAccountToken: false
  # A Service named roundhouse would put ROUNDHOUSE_PORT=tcp://... into the environment.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add .Values.preStopSeconds (include "roundhouse.drainSeconds" .) (include "roundhouse.stopSeconds" .) 15 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  containers:
    - name: roundhouse
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      ports:
        - {name: http, containerPort: 8080}
      env:
        - name: ROUNDHOUSE_CONFIG
          value: /etc/roundhouse/roundhouse.yaml
        - name: ROUNDHOUSE_STATE_DIR
          value: /state
        - name: ROUNDHOUSE_API_KEYS
          valueFrom:
            secretKeyRef: {name: {{ include "roundhouse.keySecret" . }}, key: {{ .Values.auth.secretKey }}}
        {{- with .Values.postgresql }}
        {{- if .existingSecret }}
        - name: ROUNDHOUSE_ADDRESS  # at which the other nodes reach this one
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        - name: ROUNDHOUSE_STORE_URL
          valueFrom:
            secretKeyRef: {name: {{ .existingSecret }}, key: {{ .secretKey }}}
        {{- end }}
        {{- end }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      # HTTP is served before any engine has loaded, so a pod that loads for minutes is unready, but not restarted.
      startupProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: {{ div .Values.probes.startupSeconds 2 }}
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ div .Values.probes.livenessSeconds 10 }}
      # Asks /readyz with the key; its answer, the models without a ready worker, appears in the pod's events.
      readinessProbe:
        exec: {command: [python, /usr/local/lib/roundhouse-healthcheck.py]}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 2
      lifecycle:
        preStop:
          sleep: {seconds: {{ .Values.preStopSeconds }}}
      {{- with .Values.resources }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: config, mountPath: /etc/roundhouse, readOnly: true}
        - {name: state, mountPath: /state}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "roundhouse.name" . }}}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
    {{- if or .Values.groups.size (not .Values.persistence.enabled) }}
    - name: state
      emptyDir: {}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
