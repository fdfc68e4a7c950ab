# A real two-node Kubernetes cluster on this machine (Linux, root). PYTHON is the project's interpreter.
PYTHON ?= python3

.PHONY: cluster cluster-down cluster-env cluster-status cluster-load images

cluster: ## Bring up the cluster (the first time builds Kubernetes, about 10 minutes)
	@$(PYTHON) -m tests.cluster up

cluster-down: ## Remove the cluster and everything it left
	@$(PYTHON) -m tests.cluster down

cluster-env: ## Print shell commands that point kubectl, helm and python at it: eval "$$(make -s cluster-env)"
	@$(PYTHON) -m tests.cluster env

cluster-status: ## Show the cluster's programs and nodes
	@$(PYTHON) -m tests.cluster status

cluster-load: ## Put an image on every node: make cluster-load IMAGE=server
	@test -n "$(IMAGE)" || { echo "name the image: make cluster-load IMAGE=server" >&2; exit 1; }
	@$(PYTHON) -m tests.cluster load "$(IMAGE)"

images: ## Build the product's images without a container engine; that with Ray: python -m tests.cluster images ray
	@$(PYTHON) -m tests.cluster images
