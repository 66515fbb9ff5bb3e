"""Stands where ``mcli`` would, the client of a cloud: ``import composer`` imports it.

Composer looks into it on that cloud only. The toolchain of Composer has this folder on its path
(noxfile.py).
"""
