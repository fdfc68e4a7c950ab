"""Settings as pydantic models: of processes, of attached clients, of the TransferQueue resource."""
