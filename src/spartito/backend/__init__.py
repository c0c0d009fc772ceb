"""``torch.distributed.init_process_group("spartito")``: our collectives in any torch program.

The groups are those of ranks on CPUs. Ranks on one machine share memory;
where they are on several, there is a TCP connection between each two.
"""
