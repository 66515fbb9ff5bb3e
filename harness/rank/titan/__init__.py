"""torchtitan: ``common/`` is the same for every release, ``v0_2/`` and ``v0_3/`` speak to one.

``v0_3/`` also speaks to torchtitan's main branch.
"""
