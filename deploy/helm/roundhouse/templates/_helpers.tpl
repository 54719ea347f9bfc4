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
{{- end -}}
