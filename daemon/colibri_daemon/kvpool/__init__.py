"""The only writer of KV metadata: which slab of the arena belongs to whom, what it holds, and what may be evicted.

pool.py is the core: plain accounting, no sockets, no clocks. It never touches KV contents.
"""
