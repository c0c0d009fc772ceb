"""Packing examples into shards: ``spartito data pack``.

    source ──> plan ──────────> shards ──> destination
    (folder,   (order, cuts)    (writers)  (folder, store)
     packed set)

What a shard holds is a function of the source, the options and the versions of the libraries that
write: so shards are made in any order, by several threads, and again after a kill.
"""
