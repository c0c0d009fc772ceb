"""A whole job with parameter servers in one thread and in virtual time, with faults by seed."""
