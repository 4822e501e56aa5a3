{{/* Base name of all objects of the release. KubeRay appends to it, and names have at most 63 characters. */}}
{{- define "ewsjf.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $both := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $both .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "ewsjf.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Selector labels of pods. KubeRay sets its own `app.kubernetes.io` labels, so these are different. */}}
{{- define "ewsjf.selector" -}}
ewsjf/release: {{ .Release.Name }}
{{- end -}}

{{- define "ewsjf.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}

{{/* Service account; empty to let KubeRay choose. */}}
{{- define "ewsjf.serviceAccount" -}}
{{ .Values.serviceAccountName | default (.Values.discoverEndpoints | ternary (include "ewsjf.fullname" .) "") }}
{{- end -}}

{{/* How it runs. By default in one pod if all engines are servers outside. */}}
{{- define "ewsjf.mode" -}}
{{- $mode := "standalone" -}}
{{- range $model := .Values.application.models -}}
{{- range $pool := $model.pools -}}
{{- if not (dig "engine" "remote" "" $pool) -}}{{- $mode = "rayservice" -}}{{- end -}}
{{- if and (eq $.Values.mode "standalone") (dig "engine" "vllm" "" $pool) -}}
{{- fail (printf "pool %s of %s runs vLLM, which mode standalone has no pods for: set mode to rayservice" $pool.name $model.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ .Values.mode | default $mode }}
{{- end -}}

{{/* Service in front of the gateways. KubeRay appends to the name of its own. */}}
{{- define "ewsjf.service" -}}
{{ include "ewsjf.fullname" . }}{{ include "ewsjf.mode" . | eq "rayservice" | ternary "-serve-svc" "" }}
{{- end -}}

{{/* Configuration that is served. */}}
{{- define "ewsjf.configuration" -}}
proxy_location: Disabled
http_options: {host: 0.0.0.0, port: {{ .Values.service.port }}}
logging_config: {enable_access_log: false}
applications:
  - name: ewsjf
    route_prefix: /
    import_path: serve_app.app:build_app
    args: {{ toYaml .Values.application | nindent 6 }}
{{- end -}}

{{- define "ewsjf.redis" -}}
{{ include "ewsjf.fullname" . }}-redis
{{- end -}}

{{/* Drain timeout of gateways in seconds; the application's default if it is not set. */}}
{{- define "ewsjf.gatewayDrain" -}}
{{ dig "gateways" "drain_timeout_s" 600.0 .Values.application | ceil | int }}
{{- end -}}

{{/*
Drain time of a node after SIGTERM, in seconds: the longest drain timeout of gateways and pools, and 30 s for engines to stop.
Ray's default of 30 s would abort requests that the application still completes.
*/}}
{{- define "ewsjf.nodeDrain" -}}
{{- $longest := include "ewsjf.gatewayDrain" . | int -}}
{{- range .Values.application.models -}}
{{- range .pools -}}
{{- $longest = max $longest (dig "drain_timeout_s" 600.0 . | ceil | int) -}}
{{- end -}}
{{- end -}}
{{ add $longest 30 }}
{{- end -}}

{{/* Environment of `ray start` on every node: serve_app/cli/serve/serve.env, and Ray's drain limit. */}}
{{- define "ewsjf.environment" -}}
- {name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S, value: "2"}
- {name: RAY_SERVE_SLOW_STARTUP_WARNING_S, value: "300"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_raylet_start_wait_time_s, value: "120"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_SERVE_CONTROL_LOOP_INTERVAL_S, value: "0.2"}
- {name: RAY_SERVE_METRICS_EXPORT_INTERVAL_MS, value: "10000"}
- {name: RAY_task_events_report_interval_ms, value: "0"}
- {name: RAY_event_stats, value: "0"}
- {name: RAY_object_manager_timer_freq_ms, value: "1000"}
- {name: RAY_local_fs_monitor_interval_ms, value: "5000"}
- {name: RAY_raylet_check_gc_period_milliseconds, value: "1000"}
- {name: RAY_kill_idle_workers_interval_ms, value: "1000"}
- {name: RAY_io_context_monitor_probe_interval_ms, value: "10000"}
- {name: EVENT_AGENT_REPORT_INTERVAL_SECONDS, value: "5"}
- {name: RAY_DASHBOARD_AGGREGATOR_AGENT_CHECK_MAIN_THREAD_LIVENESS_INTERVAL_SECONDS, value: "5"}
- {name: REPORTER_UPDATE_INTERVAL_MS, value: "15000"}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ include "ewsjf.nodeDrain" . | quote }}}
{{- with .Values.environment }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Common part of all pods. Takes `root` and `group`. */}}
{{- define "ewsjf.pod" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.podSecurityContext }}
securityContext: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with include "ewsjf.serviceAccount" .root }}
serviceAccountName: {{ . }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "volumes" }}
{{- with get $.group $key }}
{{ $key }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Common part of all containers. Takes `root`, `group`, and `environment`. */}}
{{- define "ewsjf.container" -}}
image: {{ include "ewsjf.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- with .environment }}
env: {{ . | nindent 2 }}
{{- end }}
{{- with .root.Values.secretName }}
envFrom: [{secretRef: {name: {{ . }}}}]
{{- end }}
{{- with .group.volumeMounts }}
volumeMounts: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Fails if no node can hold a replica, which would wait forever. */}}
{{- define "ewsjf.checkPools" -}}
{{- range $model := .Values.application.models -}}
{{- range $pool := $model.pools -}}
{{- if not (dig "engine" "remote" dict $pool) -}}
{{- $gpus := dig "resources" "num_gpus" 0.0 $pool -}}
{{- $cpus := dig "resources" "num_cpus" 1.0 $pool -}}
{{- $wanted := keys (dig "resources" "custom" dict $pool) -}}
{{- with dig "resources" "accelerator_type" "" $pool }}{{ $wanted = append $wanted (printf "accelerator_type:%s" .) }}{{ end -}}
{{- $holds := false -}}
{{- range $group := $.Values.workers -}}
{{- $offers := append (keys (default dict $group.resources)) (printf "group_%s" $group.name) -}}
{{- $hasAll := true -}}
{{- range $wanted }}{{ if not (has . $offers) }}{{ $hasAll = false }}{{ end }}{{ end -}}
{{- if and $hasAll (le (float64 $gpus) (float64 (default 0 $group.gpus))) (le (float64 $cpus) (float64 $group.cpus)) -}}
{{- $holds = true -}}
{{- end -}}
{{- end -}}
{{- if not (or $holds (and (not $wanted) (eq (float64 $gpus) 0.0) (le (float64 $cpus) (float64 $.Values.head.cpus)))) -}}
{{- fail (printf "pool %s of %s: no group of workers has nodes for %v GPUs and %v CPUs%s; change workers, or the pool's resources" $pool.name $model.name $gpus $cpus ($wanted | empty | ternary "" (printf " with %s" (join " and " $wanted)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
