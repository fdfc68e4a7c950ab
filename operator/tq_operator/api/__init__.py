"""The Kubernetes face of the resource types: CRD and values schema, generated from the pydantic models."""
