{{- define "kme-dist.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kme-dist.scheduler" -}}
tls://{{ include "kme-dist.name" . }}-scheduler:8786
{{- end -}}

{{- define "kme-dist.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "kme-dist.labels" -}}
app.kubernetes.io/name: kme-dist
app.kubernetes.io/instance: {{ include "kme-dist.name" . }}
{{- end -}}

{{- define "kme-dist.dataClaim" -}}
{{- .Values.storage.existingClaim | default (printf "%s-data" (include "kme-dist.name" .)) -}}
{{- end -}}

{{- define "kme-dist.clusterSecret" -}}
{{- .Values.tls.clusterSecret | default (printf "%s-tls" (include "kme-dist.name" .)) -}}
{{- end -}}

{{- define "kme-dist.clientSecret" -}}
{{- .Values.tls.clientSecret | default (printf "%s-client-tls" (include "kme-dist.name" .)) -}}
{{- end -}}

{{- /* What every pod has: no rights, no token. */ -}}
{{- define "kme-dist.pod" -}}
serviceAccountName: {{ include "kme-dist.name" . }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Which nodes a pod may run on; the argument is its section of the values. */ -}}
{{- define "kme-dist.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kme-dist.container" -}}
image: {{ include "kme-dist.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Credentials of an object store, for whatever reads or writes data. */ -}}
{{- define "kme-dist.credentials" -}}
envFrom:
  - secretRef:
      name: {{ .Values.storage.storeSecret | default (printf "%s-store" (include "kme-dist.name" .)) }}
      optional: true
{{- end -}}

{{- /* Certificates and settings, for all; the shared disk, for all but the scheduler. */ -}}
{{- define "kme-dist.mounts" -}}
- {name: tls, mountPath: /etc/kme-dist/tls, readOnly: true}
- {name: dask, mountPath: /etc/kme-dist/dask, readOnly: true}
- {name: scratch, mountPath: /scratch}
{{- end -}}

{{- /* list ROOT SECRET SCRATCH: the volumes of these mounts. */ -}}
{{- define "kme-dist.volumes" -}}
{{- $root := index . 0 -}}
- name: tls
  secret: {secretName: {{ index . 1 }}, defaultMode: 0440}
- name: dask
  configMap: {name: {{ include "kme-dist.name" $root }}-dask}
- name: scratch
  emptyDir: {sizeLimit: {{ index . 2 }}}
{{- end -}}

{{- define "kme-dist.dataVolume" -}}
- name: data
  persistentVolumeClaim: {claimName: {{ include "kme-dist.dataClaim" . }}}
{{- end -}}

{{- define "kme-dist.workerLiveness" -}}
livenessProbe:
  httpGet: {path: /health, port: http-dashboard}
  initialDelaySeconds: 20
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 5
{{- end -}}

{{- /* Exit codes: 75 and deaths count towards the limit; 1 (a bug), 2 (the user's input), 3 (numerical failure) and 65
     (stored data corrupt) would fail again and end the job; a drained node does not count. The argument names the
     container. */ -}}
{{- define "kme-dist.podFailurePolicy" -}}
podFailurePolicy:
  rules:
    - action: Ignore
      onPodConditions:
        - {type: DisruptionTarget, status: "True"}
    - action: FailJob
      onExitCodes:
        containerName: {{ . }}
        operator: In
        values: [1, 2, 3, 65]
{{- end -}}

{{- define "kme-dist.schedulerPod" -}}
{{ include "kme-dist.pod" . }}
{{- include "kme-dist.placement" .Values.scheduler }}
containers:
  - name: scheduler
    {{- include "kme-dist.container" . | nindent 4 }}
    args: [dask, scheduler, --protocol, tls, --port, "8786", --dashboard-address, ":8787",
           --preload, kme_dist.dashboard]
    env:
      - {name: DASK_CONFIG, value: /etc/kme-dist/dask}
    ports:
      - {name: tcp-comm, containerPort: 8786}
      - {name: http-dashboard, containerPort: 8787}
    readinessProbe:
      httpGet: {path: /health, port: http-dashboard}
      periodSeconds: 10
    livenessProbe:
      httpGet: {path: /health, port: http-dashboard}
      initialDelaySeconds: 20
      periodSeconds: 20
      timeoutSeconds: 10
    resources:
      {{- toYaml .Values.scheduler.resources | nindent 6 }}
    volumeMounts:
      {{- include "kme-dist.mounts" . | nindent 6 }}
volumes:
  {{- include "kme-dist.volumes" (list . (include "kme-dist.clusterSecret" .) "1Gi") | nindent 2 }}
{{- end -}}

{{- define "kme-dist.schedulerService" -}}
type: ClusterIP
selector:
  dask.org/cluster-name: {{ include "kme-dist.name" . }}
  dask.org/component: scheduler
ports:
  - {name: tcp-comm, protocol: TCP, port: 8786, targetPort: tcp-comm}
  - {name: http-dashboard, protocol: TCP, port: 8787, targetPort: http-dashboard}
{{- end -}}

{{- define "kme-dist.workerPod" -}}
{{ include "kme-dist.pod" . }}
{{- include "kme-dist.placement" .Values.workers }}
terminationGracePeriodSeconds: 60
containers:
  - name: worker
    {{- include "kme-dist.container" . | nindent 4 }}
    {{- if .Values.workers.cuda }}
    # One worker for each GPU; tasks that compute on one require the resource GPU.
    args: [dask, cuda, worker, --name, $(DASK_WORKER_NAME), --nthreads, "1",
           --memory-limit, {{ .Values.workers.memoryLimit }}, --device-memory-limit, "0.8", --pre-import, cupy,
           --resources, GPU=1, --dashboard-address, ":8788", --local-directory, /scratch, --preload, kme_dist.dashboard]
    {{- else }}
    args: [dask, worker, --name, $(DASK_WORKER_NAME), --nworkers, "1", --nthreads, "1",
           --memory-limit, {{ .Values.workers.memoryLimit }}, --dashboard-address, ":8788",
           --local-directory, /scratch, --preload, kme_dist.dashboard]
    {{- end }}
    env:
      - {name: DASK_SCHEDULER_ADDRESS, value: "{{ include "kme-dist.scheduler" . }}"}
      - {name: DASK_CONFIG, value: /etc/kme-dist/dask}
      - {name: KME_ROOT, value: /data}
      {{- if not .Values.operator.enabled }}
      - name: DASK_WORKER_NAME    # the operator sets its own
        valueFrom: {fieldRef: {fieldPath: metadata.name}}
      {{- end }}
    {{- include "kme-dist.credentials" . | nindent 4 }}
    ports:
      - {name: http-dashboard, containerPort: 8788}
    {{- include "kme-dist.workerLiveness" . | nindent 4 }}
    resources:
      {{- toYaml .Values.workers.resources | nindent 6 }}
    volumeMounts:
      {{- include "kme-dist.mounts" . | nindent 6 }}
      - {name: data, mountPath: /data}
volumes:
  {{- include "kme-dist.volumes" (list . (include "kme-dist.clusterSecret" .) .Values.workers.scratch) | nindent 2 }}
  {{- include "kme-dist.dataVolume" . | nindent 2 }}
{{- end -}}
