"""One module a peer; its ``PEER`` is the class that ``bench.serve`` starts."""
