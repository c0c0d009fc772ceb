"""Examples packed into few large files: Parquet, tars of WebDataset, MDS shards, JSON lines.

    locate ──> index ──> Blocks ──> PackedSource ──> batches
    manifest   formats   order      reading, columns

A **block** is a run of examples that are fetched and decoded together: a row group, some samples
of a tar. An **index** says which blocks a file has; it is made once for each file and kept in the
cache. The order of a pass is a function of the blocks' sizes, so it needs nothing that is in them.
"""
