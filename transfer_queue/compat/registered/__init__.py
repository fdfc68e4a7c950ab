"""Blocks in a store of the user's own, through a class that was registered as 0.1.x has it.

``registry`` has the registries and base classes. The class runs in the processes that registered it, in no server: the
client side hands it each block as a row of one field, and the storage unit keeps the account of the blocks, with what
the class said about each, and of those that a client is to remove from the store.
"""
