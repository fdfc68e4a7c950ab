{{/* Values that a release from before them lacks, as with helm upgrade --reuse-values, get the chart's defaults. */}}
{{- define "transferqueue.fill" -}}
{{- $into := .into }}
{{- range $key, $value := .from }}
{{- if or (not (hasKey $into $key)) (kindIs "invalid" (index $into $key)) }}
{{- $_ := set $into $key $value }}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $into $key)) }}
{{- include "transferqueue.fill" (dict "into" (get $into $key) "from" $value) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The name of a Service begins with a letter. */}}
{{- define "transferqueue.name" -}}
{{- regexReplaceAll "^([0-9])" .Release.Name "tq-${1}" | trunc 40 | trimSuffix "-" }}-operator
{{- end }}

{{/* A pod template with podTemplate of the values over it: objects are merged, lists of named entries by their names, and
other lists replaced. An entry of containers called "*" is for all of them, one without an image never adds a container. */}}
{{- define "transferqueue.pod" -}}
{{- $pod := fromYaml .pod }}
{{- $over := deepCopy (.root.Values.podTemplate | default dict) }}
{{- if .root.Values.openshift }}
{{- $_ := set $pod.spec "securityContext" (omit $pod.spec.securityContext "runAsUser" "runAsGroup" "fsGroup") }}
{{- end }}
{{- $own := deepCopy ($pod.metadata | default dict) }}
{{- $pod = mergeOverwrite $pod (dict "metadata" ($over.metadata | default dict)) }}
{{- $_ := set $pod "metadata" (mergeOverwrite $pod.metadata $own) }}
{{- $spec := $over.spec | default dict }}
{{- range $list := list "containers" "initContainers" "volumes" "imagePullSecrets" }}
{{- if hasKey $spec $list }}
{{- $entries := get $pod.spec $list | default list }}
{{- range $entry := get $spec $list }}
{{- $result := list }}
{{- $found := false }}
{{- range $entries }}
{{- $each := and (eq $entry.name "*") (hasSuffix "ontainers" $list) }}
{{- if or $each (eq .name $entry.name) }}
{{- $found = true }}
{{- $merged := mergeOverwrite (deepCopy .) (omit $entry "name" "env" "volumeMounts") }}
{{- range $inner := list "env" "volumeMounts" }}
{{- if hasKey $entry $inner }}
{{- $_ := set $merged $inner (concat (get $merged $inner | default list) (get $entry $inner)) }}
{{- end }}
{{- end }}
{{- $result = append $result $merged }}
{{- else }}
{{- $result = append $result . }}
{{- end }}
{{- end }}
{{- if and (not $found) (or (not (hasSuffix "ontainers" $list)) (hasKey $entry "image")) }}
{{- $result = append $result $entry }}
{{- end }}
{{- $entries = $result }}
{{- end }}
{{- $_ := set $pod.spec $list $entries }}
{{- end }}
{{- end }}
{{- $_ := set $pod "spec" (mergeOverwrite $pod.spec (omit $spec "containers" "initContainers" "volumes" "imagePullSecrets")) }}
{{- if and $pod.spec.hostNetwork (not $pod.spec.dnsPolicy) }}
{{- $_ := set $pod.spec "dnsPolicy" "ClusterFirstWithHostNet" }}
{{- end }}
{{- toYaml $pod }}
{{- end }}

{{- define "transferqueue.selector" -}}
app.kubernetes.io/name: transferqueue-operator
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "transferqueue.labels" -}}
{{ include "transferqueue.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Webhooks see neither Kubernetes' own namespaces nor the chart's, unless that is watched: a broken operator can always be repaired. */}}
{{- define "transferqueue.namespaceSelector" -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
      {{- $own := has .Release.Namespace .Values.watchNamespaces | ternary (list) (list .Release.Namespace) }}
      {{- range concat (list "kube-system" "kube-public" "kube-node-lease") $own .Values.webhook.excludeNamespaces | uniq }}
      - {{ . | quote }}
      {{- end }}
  {{- with .Values.watchNamespaces }}
  - key: kubernetes.io/metadata.name
    operator: In
    values: {{- toYaml . | nindent 6 }}
  {{- end }}
{{- end }}

{{- define "transferqueue.rules" -}}
- apiGroups: [transferqueue.io]
  resources: [transferqueues]
  verbs: [get, list, watch]
- apiGroups: [transferqueue.io]
  resources: [transferqueuebindings]
  verbs: [list]
- apiGroups: [transferqueue.io]
  resources: [transferqueuebindings/status]
  verbs: [patch]
- apiGroups: [transferqueue.io]
  resources: [transferqueues/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion need it.
- apiGroups: [transferqueue.io]
  resources: [transferqueues/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, services]
  verbs: [get, list, watch, create, patch, delete]
# Certificates of queues, and of the pods that use them in whatever namespace; tokens are looked at only.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, patch, delete]
# Of queues whose certificates cert-manager makes.
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, list, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Of queues with rdma.claim.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# Only events tell why a StatefulSet gets no pods.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* Name of the Secret with the certificate of all replicas. */}}
{{- define "transferqueue.certificateSecret" -}}
{{- (.Values.webhook.certificate).existingSecret | default (printf "%s-webhook-tls" (include "transferqueue.name" .)) }}
{{- end }}

{{/* Whom the apiserver trusts, of a clientConfig: the value. Else the field is the operator's, and never in a manifest:
one that holds an earlier CA could neither be applied nor rolled back to. */}}
{{- define "transferqueue.bundle" -}}
{{- with (.Values.webhook.certificate).caBundle }}
{{- . | b64enc }}
{{- end }}
{{- end }}
