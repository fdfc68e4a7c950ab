{{- define "transferqueue.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}-operator
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
  verbs: [get, list, create, patch, delete]
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

{{/* Data of the Secret with the certificate of all replicas. Made once for a rendering and kept in the values: the
conversion of the definitions and the webhooks have to trust the same authority. */}}
{{- define "transferqueue.certificate" -}}
{{- if not (hasKey .Values "certificateData") }}
{{- $name := include "transferqueue.name" . }}
{{- $secretName := printf "%s-webhook" $name }}
{{- $host := printf "%s.%s.svc" $name .Release.Namespace }}
{{- $known := lookup "v1" "Secret" .Release.Namespace $secretName }}
{{- $data := dict }}
{{- if and $known $known.data (hasKey $known.data "ca.crt") }}
{{- $data = $known.data }}
{{- else }}
{{- $days := int .Values.webhook.certificateDays }}
{{- $authority := genCA (printf "%s-ca" $name) 3650 }}
{{- $names := list $name (printf "%s.%s" $name .Release.Namespace) $host }}
{{- $certificate := genSignedCert $host nil $names $days $authority }}
{{- $data = dict "ca.crt" (b64enc $authority.Cert) "ca.key" (b64enc $authority.Key) "tls.crt" (b64enc $certificate.Cert) "tls.key" (b64enc $certificate.Key) }}
{{- end }}
{{- $_ := set .Values "certificateData" $data }}
{{- end }}
{{- toYaml .Values.certificateData }}
{{- end }}
