"""The openYuanrong backend: blocks in the shared memory of data system workers."""
