"""Names and import paths of TransferQueue 0.1.5 to 0.1.11 that this release has in other places, or not at all.

`paths` is the one table of them. The rest are small modules with what exists for compatibility only.
Differences that a program can notice are listed, with their reasons, in ``docs/compatibility.md``.
"""
