"""Blocks in Ray's object store.

An object lives as long as the process that owns it, and the caller of ``ray.put`` owns it: rows of a rollout
worker would be lost with that worker. So each storage unit has an actor that owns its blocks: writers send them to it,
it puts them into the store of its node, and readers ask it for the references.
"""
